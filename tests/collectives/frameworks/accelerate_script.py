"""Accelerate, as its quick tour shows: nothing here knows of any backend."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 8)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(3):
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
losses = accelerator.gather(loss.detach())
accelerator.print(f"processes {accelerator.num_processes} loss {losses.mean().item():.6f} {type(model).__name__}")
accelerator.wait_for_everyone()
accelerator.end_training()
