"""Where checkpoint elements are in a worker's memory: recorded and proven (`layers`), or loaded again
(`reload`).
"""
