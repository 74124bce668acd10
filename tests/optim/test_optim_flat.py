"""Flat buffers change the places of tensors, and no results."""

import copy
import io
import pickle

import golden
import pytest
import torch
from optimizing import gradients

import pycomm.optim as optim
from pycomm._training.flat import Layout, home_of


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(70, 100), torch.nn.Linear(100, 65, bias=False)]
    model = torch.nn.Sequential(*layers).bfloat16()
    return model.append(torch.nn.LayerNorm(65))  # fp32


def backward(model, step):
    """Gives parameters random gradients, through autograd; those in eval mode get none."""
    params = [p for m in model if m.training for p in m.parameters() if p.requires_grad]
    for param, grad in zip(params, gradients(params, step), strict=True):
        (param * grad).sum().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_over_flat_buffers_give_the_same_bits(set_to_none):
    """Frozen and unused parameters as well: nothing decays that would not without."""
    plain, flat = network(), network()
    for model in (plain, flat):
        model[0].bias.requires_grad_(False)
    buffers = optim.flatten(flat.parameters())
    made = []
    for model in (plain, flat):
        optimizer = optim.FusedAdamW(model.parameters(), states="8bit", master_weights="remainder")
        for step in range(4):
            model[1].train(step != 2)
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, step)
            optimizer.step()
        made.append(optimizer)
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert golden.same_bits(one, other)
        ours, theirs = made[0].state.get(one, {}), made[1].state.get(other, {})
        assert ours.keys() == theirs.keys()
        assert all(golden.same_bits(ours[key], theirs[key]) for key in ours)
        if other.requires_grad:
            offset = home_of(other).offset
            (whole,) = (b for b in buffers.parameters if b.dtype == other.dtype)
            (grads,) = (b for b in buffers.gradients if b.dtype == other.dtype)
            assert other.data_ptr() == whole[offset:].data_ptr()
            assert other.grad.data_ptr() == grads[offset:].data_ptr()
            place, moment = (0, "exp_avg") if "exp_avg" in theirs else (offset, "exp_avg_code")
            assert theirs[moment].storage_offset() == place
            assert theirs.get("remainder", whole[offset:]).storage_offset() == offset
    loaded = optim.FusedAdamW(flat.parameters(), states="8bit", master_weights="remainder")
    for _ in range(2):  # the second time over what is there
        loaded.load_state_dict(copy.deepcopy(made[1].state_dict()))
        for param in flat.parameters():
            for key, tensor in made[1].state.get(param, {}).items():
                again = loaded.state[param][key]
                assert golden.same_bits(again, tensor)
                assert key == "step" or again.data_ptr() != tensor.data_ptr()
                assert again.storage_offset() == tensor.storage_offset()


def test_states_begin_with_zeros_again():
    model = network()
    optim.flatten(model.parameters())
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    ends = []
    for _ in range(2):
        model.load_state_dict(before)
        optimizer.state.clear()
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        ends.append(copy.deepcopy(model.state_dict()))
    assert all(golden.same_bits(ends[0][name], ends[1][name]) for name in before)


def in_place(param):
    """True if parameter and gradient lie in their buffers."""
    home = home_of(param)
    if home is None:
        return False
    grad = home.of(home.piece.gradients, param)
    return param.grad is None or param.grad.data_ptr() == grad.data_ptr()


def test_model_and_gradients_follow_the_buffers():
    model = network()
    before = copy.deepcopy(model.state_dict())
    backward(model, 0)
    held = [p.grad.clone() for p in model.parameters()]
    flat = optim.flatten(model.parameters())
    for param, grad in zip(model.parameters(), held, strict=True):
        assert in_place(param)
        assert golden.same_bits(param.grad, grad)
    model.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    next(b for b in flat.parameters if b.dtype == torch.float32).zero_()
    assert not model[2].weight.any()
    model.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1)
    backward(model, 2)  # accumulates
    assert all(in_place(p) for p in model.parameters())
    params = list(model.parameters())
    for param, one, other in zip(params, gradients(params, 1), gradients(params, 2), strict=True):
        assert golden.same_bits(param.grad, one + other)
    assert flat.padding == pytest.approx(1 - 13_730 / (7_040 + 128 + 6_528 + 2 * 128))


def test_padding_of_real_models_is_under_a_hundredth_and_of_tiny_ones_is_told():
    with torch.device("meta"):
        transformer = torch.nn.Transformer(512, num_encoder_layers=6, num_decoder_layers=6)
        mobile = [torch.nn.Conv2d(96, 576, 1, bias=False), torch.nn.Conv2d(576, 576, 3, groups=576)]
        mobile += [torch.nn.BatchNorm2d(576), torch.nn.Conv2d(576, 96, 1), torch.nn.Linear(96, 10)]
        for model in (transformer, torch.nn.Sequential(*mobile)):
            params = list(model.parameters())
            layout = Layout(params, lambda n, dtype, _: torch.zeros(n, dtype=dtype))
            length = sum(len(piece.gradients) for piece in layout.pieces)
            assert 0 <= 1 - sum(p.numel() for p in params) / length < 0.01
    assert optim.flatten([torch.nn.Parameter(torch.ones(1))]).padding == 63 / 64
    assert optim.flatten([]).padding == 0


def test_gradients_that_cannot_lie_in_the_buffer_are_left_alone():
    """With a graph, sparse, or of another type."""
    dense, table, free = (torch.nn.Parameter(torch.ones(8, 3)) for _ in range(3))
    free.grad_dtype = None
    optim.flatten([dense, table, free])
    dense.square().sum().backward(create_graph=True)
    assert dense.grad.requires_grad
    torch.nn.functional.embedding(torch.tensor([3]), table, sparse=True).sum().backward()
    assert table.grad.is_sparse
    free.grad = torch.ones(8, 3, dtype=torch.float64)
    free.sum().backward()
    assert free.grad.dtype == torch.float64
    assert torch.equal(free.grad, torch.full((8, 3), 2.0, dtype=torch.float64))


def test_gradients_may_have_another_type_and_parameters_any_format():
    half = torch.nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))
    half.grad_dtype = torch.float32
    image = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned, empty = torch.nn.Parameter(torch.randn(4, 7).t()), torch.nn.Parameter(torch.ones(0, 2))
    params = [half, image, turned, empty, torch.nn.Parameter(torch.tensor(2.0))]
    before = [p.detach().clone(memory_format=torch.preserve_format) for p in params]
    flat = optim.flatten([*params, image])  # one may come twice
    assert [b.dtype for b in flat.parameters] == [torch.bfloat16, torch.float32]
    assert [b.dtype for b in flat.gradients] == [torch.float32] * 2
    for param, old in zip(params, before, strict=True):
        assert golden.same_bits(param, old)
        assert param.stride() == old.stride()
        (param.float() * 3).sum().backward()
        assert in_place(param)
        assert torch.equal(param.grad, torch.full_like(param.grad, 3))


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        (torch.ones(3, requires_grad=True), TypeError, "a single one"),
        ([("name", torch.ones(3))], TypeError, "got tuple"),
        ([torch.ones(3, requires_grad=True) * 2], ValueError, "leaves"),
        ([torch.ones(6, 4)[::2].requires_grad_()], ValueError, "dense"),
        ([torch.ones(1, 4).expand(3, 4).detach().requires_grad_()], ValueError, "dense"),
        ([(one := torch.nn.Parameter(torch.ones(8))), torch.nn.Parameter(one.data[4:])],
         ValueError, "share memory"),
    ],
)  # fmt: skip
def test_refuses(params, error, match):
    before = [p.data_ptr() for p in params if isinstance(p, torch.Tensor)]
    with pytest.raises(error, match=match):
        optim.flatten(params)
    assert before == [p.data_ptr() for p in params if isinstance(p, torch.Tensor)]


def test_copies_are_whole_and_not_flat():
    model = network()
    flat = optim.flatten(model.parameters())
    backward(model, 0)
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < 1.5 * sum(b.nbytes for b in flat.parameters + flat.gradients)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert golden.same_bits(mine, its)
            assert home_of(its) is None
            before = mine.detach().clone()
            its.data.fill_(9)
            assert golden.same_bits(mine, before)
        other.zero_grad()
        backward(other, 1)
        optim.FusedAdamW(other.parameters()).step()
        optim.flatten(other.parameters())
    with pytest.raises(ValueError, match="flattened before"):
        optim.flatten(model.parameters())


def test_a_model_that_moves_away_is_no_longer_flat():
    """States are its own then, and others' places are safe."""
    plain, flat = network(), network()
    optim.flatten(flat.parameters())
    for model in (plain, flat):
        model.float()
        optimizer = optim.FusedAdamW(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert golden.same_bits(one, other)
    assert [in_place(p) for p in flat.parameters()] == [False] * 3 + [True] * 2
    again = optim.flatten(flat[:2].parameters())
    assert len(again.parameters) == 1
    assert all(in_place(p) for p in flat.parameters())


def test_compiled():
    """The module, and a function with forward and backward in it."""
    plain, flat = (torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3)) for _ in "ab")
    flat.load_state_dict(plain.state_dict())
    optim.flatten(flat.parameters())
    for model in (plain, flat):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        whole = torch.compile(
            lambda x, m=model: m(x).square().sum().backward(), backend="aot_eager"
        )
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
            if step % 2:
                whole(x)
            else:
                compiled(x).square().sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert golden.same_bits(one, other)
        assert in_place(other)


def test_loading_an_optimizers_own_checkpoint_changes_nothing():
    """Its tensors are views of the buffers that loading fills."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
    optim.flatten([param])
    optimizer = optim.FusedAdamW([param], master_weights="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.state[param]["master_param"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    assert golden.same_bits(optimizer.state[param]["master_param"], before)
