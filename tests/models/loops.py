"""Small models and loops of every usual kind, each written once and run twice, see `truth`."""

import contextlib

import torch
from torch import nn

STEPS = 3


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def train(watch, model, batch, *, make=adamw, micro_steps=1, steps=STEPS, ready=lambda: None, autocast=None):
    """Train `model` to make what it returns small; `ready` is called before each optimizer step, as clipping is."""
    optimizer = make(list(model.parameters()))
    watch.start(model, optimizer, micro_steps)
    for _ in range(steps):
        for _ in range(micro_steps):
            with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
                loss = loss_of(model(**batch())) / micro_steps
            watch.record(loss)
            watch.backward(loss)
        with watch.step():
            ready()
            optimizer.step()
        optimizer.zero_grad()


def loss_of(output):
    """Return the loss that a model returned, or the mean square of what it returned."""
    found = getattr(output, "loss", None)
    return output.square().mean() if found is None else found


class Net(nn.Module):
    """Convolution, batch norm, an in-place activation, dropout, a parameter without gradient and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.mix = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten(), nn.Linear(20, 3))
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def encode(self, x):
        return self.mix(self.norm(self.conv(x)))

    def forward(self, x):
        return self.frozen(self.encode(x)) * self.scale

    def loss(self, x):
        return self.encode(x).abs().mean() * self.scale


class Words(nn.Module):
    """An embedding that is tied to the head, or a sparse one, and an LSTM between."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=sparse)
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(6, 11, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        states, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(states) + hidden.mean()


class Complex(nn.Module):
    """Complex weights between real inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 4, dtype=torch.complex64)

    def forward(self, x):
        return self.inner(torch.fft.fft(x)).abs()


def signal():
    return {"x": torch.randn(4, 2, 5)}


def tokens():
    return {"tokens": torch.randint(11, (3, 5))}


def plain(watch):
    train(watch, Net(), signal)


def accumulation(watch):
    model = Net()
    train(watch, model, signal, micro_steps=3, ready=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def clipping_by_value(watch):
    model = Net()
    train(watch, model, signal, ready=lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-4))


def autocast(watch):
    train(watch, Net(), signal, autocast=torch.bfloat16)


def lstm_with_tied_weights(watch):
    train(watch, Words(), tokens)


def complex_weights(watch):
    train(watch, Complex(), lambda: {"x": torch.randn(3, 5)})


def bfloat16(watch):
    train(watch, Words().bfloat16(), tokens)


def float64(watch):
    train(watch, Words().double(), tokens)


def gradients_set_to_zero(watch):
    model = Net()
    optimizer = adamw(model.parameters())
    watch.start(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        watch.backward(model(**signal()).square().mean())
        with watch.step():
            optimizer.step()


def loss_scaler(watch):
    """The second step of the scaler finds an infinity, and the optimizer makes none."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = adamw(model.parameters())
    watch.start(model, optimizer)
    for turn in range(STEPS + 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**signal()).square().mean()
        watch.backward(scaler.scale(loss * float("inf") if turn == 1 else loss))
        with watch.step() if turn != 1 else contextlib.nullcontext():
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if turn == 1:
            watch.skipped()


def averaged_weights(watch):
    """Moving averages of the weights, kept by a copy of the model and swapped in for an evaluation."""
    model = Net()
    optimizer = adamw(model.parameters())
    watch.start(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(STEPS):
        watch.backward(model(**signal()).square().mean())
        with watch.step():
            optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(average.module.state_dict())
        model.eval()(**signal())
        model.load_state_dict(kept)
        model.train()


def entry_by_a_method(watch):
    model = Net()
    optimizer = adamw(model.parameters())
    watch.start(model, optimizer)
    for step in range(STEPS):
        loss = model.loss(**signal()) if step else model(**signal()).square().mean()
        watch.backward(loss)
        with watch.step():
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        optimizer.zero_grad()


def compiled_later(watch, backend="aot_eager", *, in_place=False):
    """Compiled when the monitor is there already; steps and records as the documentation has them."""
    model = Net()
    optimizer = adamw(model.parameters())
    watch.start(model, optimizer)
    if in_place:
        model.compile(backend=backend)
    called = model if in_place else torch.compile(model, backend=backend)
    for _ in range(STEPS + 2):
        watch.backward(called(**signal()).square().mean())
        with watch.step():
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        optimizer.zero_grad()


def l_bfgs(watch):
    """The gradients of a step are those of its first evaluation, the parameters those before and after all of them."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watch.start(model, optimizer)
    for _ in range(STEPS):
        x, step, losses = torch.randn(5, 4), contextlib.ExitStack(), []

        def closure(x=x, step=step, losses=losses):
            optimizer.zero_grad()
            losses.append((model(x) - 1).square().mean())
            if len(losses) == 1:
                watch.backward(losses[-1])
                step.enter_context(watch.step())
            else:
                losses[-1].backward()
            return losses[-1]

        with step:
            optimizer.step(closure)


def adversaries(watch, *, of_discriminator=True):
    """A generator and a discriminator, each with an optimizer; both backwards of the game reach the discriminator."""
    critic, maker = Net(), nn.Sequential(nn.Linear(3, 10), nn.Unflatten(1, (2, 5)))
    critic_steps, maker_steps = adamw(critic.parameters()), adamw(maker.parameters())
    watch.start(*((critic, critic_steps) if of_discriminator else (maker, maker_steps)))
    for _ in range(STEPS):
        critic_steps.zero_grad()
        fake = maker(torch.randn(4, 3))
        loss = critic(torch.randn(4, 2, 5)).mean() - critic(fake.detach()).mean()
        if of_discriminator:
            watch.backward(loss)
            with watch.step():
                critic_steps.step()
        else:
            loss.backward()
            critic_steps.step()
        maker_steps.zero_grad()
        loss = critic(fake).square().mean()
        if of_discriminator:
            loss.backward()
            watch.skipped()
            maker_steps.step()
        else:
            watch.backward(loss)
            with watch.step():
                maker_steps.step()


def _tokens_and_labels(vocabulary):
    rows = torch.randint(vocabulary, (2, 7))
    return {"input_ids": rows, "labels": rows}


DECODER = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def llama(watch):
    import transformers

    config = transformers.LlamaConfig(**DECODER)
    train(watch, transformers.LlamaForCausalLM(config), lambda: _tokens_and_labels(19))


def gpt2(watch):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=19, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    train(watch, transformers.GPT2LMHeadModel(config), lambda: _tokens_and_labels(19), micro_steps=2)


def t5(watch):
    import transformers

    config = transformers.T5Config(
        vocab_size=19, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    train(watch, transformers.T5ForConditionalGeneration(config), lambda: _tokens_and_labels(19))


def mixtral(watch):
    import transformers

    config = transformers.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2)
    train(watch, transformers.MixtralForCausalLM(config), lambda: _tokens_and_labels(19))


def vit(watch):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )

    def batch():
        return {"pixel_values": torch.randn(2, 1, 8, 8), "labels": torch.randint(3, (2,))}

    train(watch, transformers.ViTForImageClassification(config), batch)
