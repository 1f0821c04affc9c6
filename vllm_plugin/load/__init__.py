"""Where checkpoint elements lie in a worker's memory: recorded (`plan`), proven (`proof`), or loaded again (`fallback`)."""
