"""Graph files: operators that a process has not registered, files of others, and what saving takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanwise.overlap.fx.files import load_graphs, save_graphs


def test_unknown_operators_and_files_that_hold_no_graphs(tmp_path: Path) -> None:
    path, library = tmp_path / "g", torch.library.Library("spanwise_test_elsewhere", "DEF")
    library.define("double(Tensor x) -> Tensor")
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.spanwise_test_elsewhere.double.default, (graph.placeholder("x"),)))
    save_graphs(path, {"one": torch.fx.GraphModule({}, graph)})
    library._destroy()
    with pytest.raises(ValueError, match="spanwise_test_elsewhere.*'double'.*import the modules"):
        load_graphs(path)
    save_graphs(path, {"one": torch.fx.symbolic_trace(torch.nn.ReLU())})
    data = path.read_bytes()
    torch.save({"a": torch.ones(3)}, path)
    for content in (path.read_bytes(), b"hello", b"PK and so on", data[:-10], data[:500] + bytes(100) + data[600:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="holds no graphs"):
            load_graphs(path)
