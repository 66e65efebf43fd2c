"""What a layer is, its own code says: nothing is written into it from outside after it is built."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nanovllm"
LAYERS = [*sorted((PACKAGE / "layers").glob("*.py")), PACKAGE / "models" / "decoder.py"]
BASES = ("WeightedModule", "nn.Module", "ParallelLinear", "Attention")
ROOMS = ("attention", "executor", "kernels", "layers", "models", "parallel", "runner", "startup", "transfer")
"""That get hold of layers."""
NAMESAKES = {("runner/model_runner.py", "backend")}
"""(file, attribute) of other objects that have one of the same name."""


def stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Assignments to attributes, `setattr` by name among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            name = node.args[1]
            yield ast.Attribute(node.args[0], name.value if isinstance(name, ast.Constant) else "?", ast.Store())


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def layer_attributes() -> set[str]:
    nodes = (node for file in LAYERS for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    layers = (one for one in classes if any(ast.unparse(base) in BASES for base in one.bases))
    return {node.attr for one in layers for node in stores(one) if is_self(node)}


def test_no_attribute_of_a_layer_is_assigned_outside_its_class() -> None:
    own = layer_attributes()
    assert {"weight", "k_cache", "matrix", "mlp", "layers"} <= own
    found = {
        (str(file.relative_to(PACKAGE)), node.attr)
        for room in ROOMS
        for file in (PACKAGE / room).rglob("*.py")
        for node in stores(ast.parse(file.read_text("utf-8")))
        if node.attr in own and not is_self(node)
    }
    assert found <= NAMESAKES
