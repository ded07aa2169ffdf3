"""The gRPC interface: `shiftjax.proto` and the code that protoc makes of it."""
