"""What is computed: model configurations, presets, weights and number formats. No JAX."""
