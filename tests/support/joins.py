"""A small model with shards, for loops in join()."""

import copy

import torch
from torch import nn

import pycomm
from pycomm import optim


def network():
    torch.manual_seed(0)
    layers = nn.Linear(40, 130), nn.BatchNorm1d(130), nn.GELU(), nn.Linear(130, 33)
    return nn.Sequential(*layers)


NETWORK = network()


def make(group, stage, **options):
    net = copy.deepcopy(NETWORK)
    model = pycomm.DataParallel(net, group=group, shard=stage, bucket_cap_mb=0.01)
    return model, optim.FusedAdamW(model.parameters(), lr=0.01, **options)


def batch(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, rank, number):
    model.zero_grad()
    model(batch(rank, number)).square().mean().backward()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
