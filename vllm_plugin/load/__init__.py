"""Where checkpoint elements lie in a worker's memory: learnt (`plan`), proven (`proof`), or loaded again (`fallback`)."""
