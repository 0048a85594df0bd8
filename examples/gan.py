"""Two steps over shared modules: each trains what its own optimizer holds, and the other module is constant to it.

python examples/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def critic_loss(critic: nn.Module, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    on_real, on_fake = critic(real), critic(generator(noise).detach())
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


def generator_loss(generator: nn.Module, noise: torch.Tensor) -> torch.Tensor:
    return F.softplus(-critic(generator(noise))).mean()


real, noise = torch.randn(128, 2) * 0.5 + 2.0, torch.randn(128, 4)
train_critic = et.prepare(critic, critic_loss, torch.optim.Adam(critic.parameters(), lr=1e-3), (real, noise))
train_generator = et.prepare(generator, generator_loss, torch.optim.Adam(generator.parameters(), lr=1e-3), (noise,))

for number in range(401):
    real, noise = torch.randn(128, 2) * 0.5 + 2.0, torch.randn(128, 4)
    a, b = train_critic(real, noise), train_generator(torch.randn(128, 4))
    if number % 100 == 0:
        mean = generator(torch.randn(1000, 4)).mean().item()
        print(f"step {number}: critic {a:.3f}, generator {b:.3f}, mean of what it makes {mean:.2f} (real: 2.00)")
