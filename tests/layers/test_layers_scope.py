"""State and scope: the same parameters, this instance only, and nothing that a copy, a hook or a pickle trips over."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from layers_fakes import experts_kernel, fakes, norm_kernel
from layers_models import _config, ids, tiny
from transformers import Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pallas_hub
from pallas_hub.layers import state


@pytest.fixture
def model():
    return tiny("qwen3_moe")


def test_parameters_are_the_same_objects_under_the_same_names(model):
    parameters, names = list(map(id, model.parameters())), list(model.state_dict())
    modules, buffers = [type(m) for m in model.modules()], list(map(id, model.buffers()))
    pallas_hub.kernelize(model, kernels=fakes())
    assert list(map(id, model.parameters())) == parameters
    assert list(model.state_dict()) == names
    assert list(map(id, model.buffers())) == buffers
    assert [type(m) for m in model.modules()] == modules


def test_an_optimizer_made_before_still_trains_what_is_used():
    plain, swapped = tiny("qwen3_moe").train(), tiny("qwen3_moe").train()
    losses = []
    for model, swap in ((plain, False), (swapped, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if swap:
            pallas_hub.kernelize(model, kernels=fakes())
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids(), labels=ids()).loss
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][2] < losses[1][0]


def test_weights_loaded_after_the_swap_are_used(model):
    other = tiny("qwen3_moe", seed=7)
    pallas_hub.kernelize(model, kernels=fakes())
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, other(ids()).logits, rtol=1e-4, atol=1e-5)


def test_other_models_of_the_class_run_their_own_code(model):
    twin, kernels = tiny("qwen3_moe"), fakes()
    pallas_hub.kernelize(model, kernels=kernels)
    third = tiny("qwen3_moe")
    for kernel in kernels.values():
        kernel.calls.clear()
    with torch.no_grad():
        twin(ids())
        third(ids())
    assert kernels["RMSNorm"].calls == kernels["experts"].calls == []
    assert not any(state.RECORD in module.__dict__ for other in (twin, third) for module in other.modules())


def test_a_model_that_shares_the_config_object_is_left_alone():
    config = _config("qwen3_moe")
    student, teacher = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    assert student.config is teacher.config
    kernels = fakes()
    pallas_hub.kernelize(student, kernels=kernels)
    kernels["experts"].calls.clear()
    with torch.no_grad():
        teacher(ids())
    assert kernels["experts"].calls == []
    assert teacher.config._experts_implementation == config._experts_implementation == "grouped_mm"
    pallas_hub.unkernelize(student)
    assert student.config is config


def test_what_the_user_changes_in_the_config_meanwhile_survives_undo(model):
    pallas_hub.kernelize(model, kernels=fakes())
    model.config.use_cache = False
    pallas_hub.unkernelize(model)
    assert model.config.use_cache is False
    assert model.config._experts_implementation == "grouped_mm"
    assert all(m.config is model.config for m in model.modules() if "config" in m.__dict__)


def test_swapping_twice_is_swapping_once(model):
    before = [dict(module.__dict__) for module in model.modules()]
    kernels = fakes()
    first = pallas_hub.kernelize(model, kernels=kernels)
    second = pallas_hub.kernelize(model, kernels=kernels)
    assert first.to_dict() == second.to_dict()
    kernels["RMSNorm"].calls.clear()
    with torch.no_grad():
        model(ids())
    assert len(kernels["RMSNorm"].calls) == 9
    pallas_hub.unkernelize(model)
    assert [module.__dict__ for module in model.modules()] == before
    pallas_hub.unkernelize(model)
    assert [module.__dict__ for module in model.modules()] == before


def test_a_second_swap_takes_the_kernels_of_the_second_call(model):
    old, new = fakes(), fakes()
    pallas_hub.kernelize(model, kernels=old)
    pallas_hub.kernelize(model, kernels=new)
    for kernel in (*old.values(), *new.values()):
        kernel.calls.clear()
    with torch.no_grad():
        model(ids())
    assert old["RMSNorm"].calls == old["experts"].calls == []
    assert new["RMSNorm"].calls
    assert new["experts"].calls


def test_two_models_may_run_two_kernels_of_one_name():
    models, kernels = [tiny("mixtral"), tiny("mixtral")], [experts_kernel(), experts_kernel()]
    for model, kernel in zip(models, kernels, strict=True):
        pallas_hub.kernelize(model, kernels={"RMSNorm": None, "experts": kernel})
    for model, kernel in zip(models, kernels, strict=True):
        calls = [len(each.calls) for each in kernels]
        with torch.no_grad():
            model(ids())
        added = [len(each.calls) - before for each, before in zip(kernels, calls, strict=True)]
        assert added == [2 if each is kernel else 0 for each in kernels]


def test_layers_stay_instances_of_their_class():
    model = tiny("llama")
    norm = model.model.norm
    pallas_hub.kernelize(model, kernels=fakes())
    assert model.model.norm is norm
    assert isinstance(norm, LlamaRMSNorm)
    assert type(norm) is LlamaRMSNorm
    assert "forward" in norm.__dict__
    assert LlamaRMSNorm.forward.__module__ == "transformers.models.llama.modeling_llama"


def test_part_of_a_model_can_be_undone(model):
    pallas_hub.kernelize(model, kernels=fakes())
    pallas_hub.unkernelize(model.model.layers[0])
    report = pallas_hub.explain(model)
    assert not report["model.layers.0.mlp.experts"].swapped
    assert report["model.layers.1.mlp.experts"].swapped
    assert not report["model.layers.0.input_layernorm"].swapped
    pallas_hub.unkernelize(model)
    assert not any(state.RECORD in module.__dict__ for module in model.modules())


def test_a_deep_copy_runs_the_kernels_on_its_own_weights(model):
    kernels = fakes()
    pallas_hub.kernelize(model, kernels=kernels)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(0.5)
        wanted = pallas_hub.unkernelize(copy.deepcopy(clone))(ids()).logits
        kernels["RMSNorm"].calls.clear()
        torch.testing.assert_close(clone(ids()).logits, wanted, rtol=1e-4, atol=1e-5)
    assert len(kernels["RMSNorm"].calls) == 9
    assert len(pallas_hub.explain(clone).swapped) == 11
    pallas_hub.unkernelize(clone)
    assert len(pallas_hub.explain(clone).swapped) == 0
    assert len(pallas_hub.explain(model).swapped) == 11
    assert not any(state.RECORD in module.__dict__ for module in clone.modules())


def test_a_pickled_norm_comes_back_with_its_original_code():
    # Not a whole Transformers model: the kernels library makes those unpicklable (functions as local classes).
    model, kernel = torch.nn.Sequential(*(m for m in tiny("llama").modules() if type(m) is LlamaRMSNorm)), norm_kernel()
    x = torch.randn(3, 32)
    with torch.no_grad():
        wanted = model(x)
        pallas_hub.kernelize(model, kernels={"RMSNorm": kernel})
        kernel.calls.clear()
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(x), wanted)
        assert kernel.calls == []
        report = pallas_hub.explain(loaded)
        assert not report.swapped
        assert report["4"].reason == "its kernel was lost, by pickling or by a later change; call kernelize again"
        assert len(pallas_hub.kernelize(loaded, kernels={"RMSNorm": kernel}).swapped) == 5
        kernel.calls.clear()
        assert torch.equal(loaded(x), wanted)
    assert len(kernel.calls) == 5


def test_saved_weights_and_config_say_nothing_of_kernels(model, tmp_path):
    pallas_hub.kernelize(model, kernels=fakes())
    model.save_pretrained(tmp_path)
    assert "pallas" not in (tmp_path / "config.json").read_text()
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._experts_implementation == "grouped_mm"
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert list(torch.load(buffer, weights_only=True)) == list(model.state_dict())


def test_hooks_fire_in_their_order(model):
    def record(model):
        seen = []
        for path, module in model.named_modules():
            if path.endswith(("norm", "experts")):
                module.register_forward_pre_hook(lambda m, args, path=path: seen.append(("pre", path)))
                module.register_forward_hook(lambda m, args, out, path=path: seen.append(("post", path)))
        return seen

    plain = tiny("qwen3_moe")
    wanted, seen = record(plain), record(model)
    pallas_hub.kernelize(model, kernels=fakes())
    with torch.no_grad():
        plain(ids())
        model(ids())
    assert seen == wanted
    assert len(seen) > 10


def test_hooks_may_change_inputs_and_results():
    model = tiny("llama")
    norm = model.model.norm
    x = torch.randn(3, 32)
    with torch.no_grad():
        wanted = norm(x * 3) + 1
        pallas_hub.kernelize(model, kernels=fakes())
        norm.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
        norm.register_forward_hook(lambda m, args, out: out + 1)
        torch.testing.assert_close(norm(x), wanted)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (torch.nn.RMSNorm(8), "x"),
        (torch.nn.RMSNorm(8, elementwise_affine=False), "x"),
        (LlamaRMSNorm(8), "hidden_states"),
    ],
    ids=["torch", "no-weight", "llama"],
)
def test_the_input_may_be_given_by_its_name(layer, name):
    x, kernel = torch.randn(3, 8), norm_kernel()
    wanted = layer(**{name: x})
    pallas_hub.kernelize(layer, kernels={"RMSNorm": kernel})
    kernel.calls.clear()
    torch.testing.assert_close(layer(**{name: x}), wanted)
    torch.testing.assert_close(layer(x), wanted)
    assert len(kernel.calls) == 2
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**{name: x}), wanted)


def test_train_eval_and_dtype_follow_the_model(model):
    model.train()
    pallas_hub.kernelize(model, kernels=fakes())
    assert all(module.training for module in model.modules())
    model.eval()
    assert not any(module.training for module in model.modules())
    model.to(torch.bfloat16)
    with torch.no_grad():
        assert model(ids()).logits.dtype == torch.bfloat16
        plain = pallas_hub.unkernelize(copy.deepcopy(model))
        assert (model(ids()).logits - plain(ids()).logits).abs().max() < 0.1


def test_a_single_layer_is_a_model_too():
    norm = LlamaRMSNorm(16)
    kernel = norm_kernel()
    report = pallas_hub.kernelize(norm, kernels={"RMSNorm": kernel})
    kernel.calls.clear()
    norm(torch.randn(2, 16))
    assert kernel.calls == [(2, 16)]
    assert [layer.path for layer in report.swapped] == [""]
    assert str(report).splitlines()[1].startswith("  (model)  LlamaRMSNorm  fake_rms_norm:RMSNorm")


def test_experts_outside_of_a_transformers_model_are_switched(model):
    block, kernel = model.model.layers[0].mlp, experts_kernel()
    pallas_hub.kernelize(torch.nn.Sequential(block), kernels={"experts": kernel})
    kernel.calls.clear()
    with torch.no_grad():
        block(torch.randn(1, 3, 32))
        assert len(kernel.calls) == 1
        model(ids())
    assert len(kernel.calls) == 2  # and not the other layers of the model it was taken from
    pallas_hub.unkernelize(block)
    assert block.experts.config is model.config
