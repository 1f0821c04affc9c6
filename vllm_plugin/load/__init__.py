"""Where checkpoint elements are in a worker's memory: recorded and proven (`loader`), or loaded again
(`fallback`).
"""
