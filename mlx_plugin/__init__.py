"""deltasync in MLX: `deltasync.follow(model, url)`, and `python -m mlx_plugin.server MODEL --channel URL`."""
