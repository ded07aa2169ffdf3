"""What the hosts of one engine say to each other, over gRPC."""
