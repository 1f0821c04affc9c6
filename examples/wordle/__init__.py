"""Wordle as an environment over HTTP, in the conventions of OpenEnv: game, server, client. Needs neither
torch nor vLLM.
"""
