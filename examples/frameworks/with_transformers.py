"""Trains a small GPT-2 with transformers' Trainer: gradients in 8 bits, resumable.

.. code-block:: shell

    torchrun --nproc-per-node 2 examples/frameworks/with_transformers.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pycomm
from pycomm.integrations.transformers import CommCallback


def train(folder: str, steps: int, resume: bool) -> torch.Tensor:
    """Trains up to a number of steps; returns the parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    texts = torch.randint(128, (256, 32), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=2, logging_steps=2, lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples)
    trainer.add_callback(CommCallback(trainer, pycomm.hooks.Int8State))
    trainer.train(resume_from_checkpoint=resume)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


if __name__ == "__main__":
    train("checkpoints", 20, resume=False)
    print("norm of the parameters", train("checkpoints", 40, resume=True).norm().item())
