"""A loop with accelerate, in one process or several with DDP: the main one publishes.

accelerate launch examples/accelerate_loop.py file:///tmp/run
deltasync log file:///tmp/run
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from deltasync import Publisher

if __name__ == "__main__":
    accelerator = Accelerator(cpu="--cpu" in sys.argv)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    publisher = Publisher(sys.argv[1]) if accelerator.is_main_process else None
    for step in range(5):
        inputs = torch.randn(8, 16, device=accelerator.device)
        loss = (model(inputs) - inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if publisher is not None:
            publisher.publish(accelerator.unwrap_model(model), step=step)
    if publisher is not None:
        publisher.close()
        save_file(accelerator.unwrap_model(model).state_dict(), "model.safetensors")
    accelerator.wait_for_everyone()  # none ends while another one still stores
    accelerator.end_training()
