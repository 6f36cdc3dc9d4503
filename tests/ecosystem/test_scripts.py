"""Typical training scripts: with CSDAdam in the place of AdamW they print the same losses.

Each is a function of the optimizer's class, which is the one line that a user changes.
"""

import pytest
import torch
from support.language_model import LanguageModel, next_token_loss
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from csd_optim import CSDAdam


def image_classifier(Optimizer):
    """Convolutions in channels_last, batch norm, cosine schedule."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).to(memory_format=torch.channels_last)
    optimizer = Optimizer(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    patterns = torch.randn(4, 3, 8, 8)
    losses = []
    for _ in range(30):
        labels = torch.randint(4, (32,))
        images = (patterns[labels] + torch.randn(32, 3, 8, 8)).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model


def sentences(n, length=17):
    """Return sequences that count up from a random start and wrap around: (n, length), int64."""
    return (torch.randint(20, (n, 1)) + torch.arange(length)) % 20


def language_model(Optimizer):
    """Tied weights, groups with and without weight decay, warm-up, gradients clipped."""
    model = LanguageModel()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = Optimizer(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses = []
    for _ in range(30):
        loss = next_token_loss(model, sentences(16))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model


def gan(Optimizer):
    """A GAN: two optimizers by turns, each on a model of its own."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_generator = Optimizer(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_critic = Optimizer(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    losses = []
    for _ in range(30):
        real, made = torch.randn(64, 2) * 0.3 + 2, generator(torch.randn(64, 8))
        of_critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(made.detach()), zeros)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(critic(made), ones)
        fooled.backward()
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return losses, nn.ModuleList([generator, critic])


def rnn(Optimizer):
    """LSTM, its state carried over from batch to batch, gradients clipped by value and by norm."""
    model = nn.ModuleDict({"lstm": nn.LSTM(1, 24, num_layers=2, batch_first=True), "head": nn.Linear(24, 1)})
    optimizer = Optimizer(model.parameters(), lr=1e-2, weight_decay=0)
    phase, carried = torch.rand(16, 1, 1) * 6, None
    losses = []
    for step in range(30):
        wave = torch.sin(phase + 0.3 * torch.arange(step * 12, step * 12 + 13).view(1, 13, 1))
        hidden, carried = model["lstm"](wave[:, :-1], carried)
        carried = tuple(t.detach() for t in carried)
        loss = F.mse_loss(model["head"](hidden), wave[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def vae(Optimizer):
    """Noise drawn within the forward, amsgrad."""
    encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 8))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 20))
    model = nn.ModuleList([encoder, decoder])
    optimizer = Optimizer(model.parameters(), lr=1e-2, amsgrad=True)
    mixing = torch.randn(3, 20)
    losses = []
    for _ in range(30):
        x = torch.tanh(torch.randn(64, 3) @ mixing)
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = -0.5 * torch.mean(1 + log_variance - mean**2 - log_variance.exp())
        loss = F.mse_loss(decoder(z), x) + 0.01 * divergence
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def gradient_accumulation(Optimizer):
    model = LanguageModel()
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    losses = []
    for batch in range(60):
        loss = next_token_loss(model, sentences(4))
        (loss / 4).backward()
        if batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def autocast_bf16(Optimizer):
    model = LanguageModel()
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model, sentences(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def grad_scaler_fp16(Optimizer):
    """The scale starts too high: the first steps overflow and are skipped."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=8)
    truth = torch.randn(8, 1)
    losses, scales = [], []
    for _ in range(30):
        x = torch.randn(64, 8)
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), torch.tanh(x @ truth))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**22  # so one was skipped
    assert max(scales[10:]) > min(scales)  # and some were not
    return losses, model


def one_cycle_and_ema(Optimizer):
    """A schedule that also changes beta1, and a moving average of the weights, which replaces them at the end."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = Optimizer(model.parameters(), lr=1e-3)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=30)
    truth = torch.randn(8, 1)
    losses = []
    for step in range(30):
        x = torch.randn(64, 8)
        if step == 20:
            model.load_state_dict(average.module.state_dict())
        loss = F.mse_loss(model(x), torch.tanh(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        losses.append(loss.item())
    return losses, nn.ModuleList([model, average])


def fine_tuning(Optimizer):
    """The head first; then the body too, with a lower learning rate and a schedule that watches the loss."""
    body, head = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1)
    body.requires_grad_(False)
    optimizer = Optimizer(head.parameters(), lr=1e-2)
    truth = torch.randn(8, 1)
    losses = []
    for step in range(30):
        if step == 10:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
            schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        x = torch.randn(64, 8)
        loss = F.mse_loss(head(body(x)), torch.tanh(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 10:
            schedule.step(round(loss.item(), 3))
        losses.append(loss.item())
    return losses, nn.ModuleList([body, head])


def optimizer_in_backward(Optimizer):
    """One optimizer per parameter, which steps as soon as the gradient is there and then drops it."""
    model = LanguageModel()
    optimizers = {p: Optimizer([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(20):
        loss = next_token_loss(model, sentences(16))
        loss.backward()
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters())
    return losses, model


# Tolerances: the largest relative difference of a loss, and of a tensor of the model by its norm. In fp32 the results
# of the two optimizers differ in their last bits, 6e-8, which 30 steps amplify about ten times. If activations are
# rounded to 16 bits, such a bit sometimes flips a rounding, by 4e-3 (bf16) or 5e-4 (fp16).
FP32, MIXED = (1e-5, 2e-5), (2e-2, 3e-2)
SCRIPTS = [
    (image_classifier, FP32),
    (language_model, FP32),
    (gan, FP32),
    (rnn, FP32),
    (vae, FP32),
    (gradient_accumulation, FP32),
    (autocast_bf16, MIXED),
    (grad_scaler_fp16, MIXED),
    (one_cycle_and_ema, FP32),
    (fine_tuning, FP32),
    (optimizer_in_backward, FP32),
]
each_script = pytest.mark.parametrize(("script", "tolerance"), SCRIPTS, ids=[f.__name__ for f, _ in SCRIPTS])


def seeded(script, Optimizer):
    torch.manual_seed(0)
    return script(Optimizer)


def differences(ours, reference):
    """Return the largest relative difference of the losses, and that of parameters and buffers."""
    (losses, model), (their_losses, their_model) = ours, reference
    of_losses = max(abs(a - b) / abs(b) for a, b in zip(losses, their_losses, strict=True))
    pairs = zip(model.state_dict().values(), their_model.state_dict().values(), strict=True)
    of_tensors = max(float((a - b).double().norm() / b.double().norm()) for a, b in pairs)
    return of_losses, of_tensors


@each_script
def test_one_line_changed(script, tolerance):
    reference = seeded(script, AdamW)
    assert reference[0][-1] < 0.9 * reference[0][0] or script is gan  # the script really learns
    of_losses, of_tensors = differences(seeded(script, CSDAdam), reference)
    assert of_losses <= tolerance[0]
    assert of_tensors <= tolerance[1]


@each_script
def test_the_comparison_sees_a_slightly_different_learning_rate(script, tolerance):
    """A wrong learning rate is noticed: one that is off by a thousandth, or by a tenth if activations are rounded."""
    wrong = 1.001 if tolerance is FP32 else 1.1

    class Wrong(AdamW):
        def step(self):
            right = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] *= wrong
            super().step()
            for group, lr in zip(self.param_groups, right, strict=True):
                group["lr"] = lr

    of_losses, of_tensors = differences(seeded(script, Wrong), seeded(script, AdamW))
    assert of_losses > tolerance[0]
    assert of_tensors > tolerance[1]
