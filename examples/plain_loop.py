"""A plain torch loop: publish after each step.

python examples/plain_loop.py file:///tmp/run
deltasync log file:///tmp/run
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

from deltasync import Publisher

if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(sys.argv[1]) as publisher:
        for step in range(5):
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)
    save_file(model.state_dict(), "model.safetensors")
