"""What runs on devices: placement, KV pools, compiled steps and the runner."""
