# Handwritten digits with a small network: plain torch, one process. with_shoal.py: on many.

import argparse

import data
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--limit", type=int, help="train on so many images only")
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

torch.set_num_threads(1)  # batches are small: more threads are slower
torch.manual_seed(options.seed)
train, test = data.load(options.limit)
loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

for epoch in range(options.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        images, labels = test.tensors
        outputs = model(images)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        loss = cross_entropy(outputs, labels)
    print(f"epoch {epoch + 1}: held-out loss {loss:.4f}, accuracy {accuracy:.1%}")
