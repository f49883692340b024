"""ONNX graphs that are written node by node, and run on tensors of torch by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession, OrtValue, SessionOptions
from torch import Tensor

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
OPSETS = {"": 20, MICROSOFT: 1}
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
}


class Graph:
    """An ONNX graph that is being written: a call adds a node, and returns the name of its output,
    or of each of several.
    """

    def __init__(self) -> None:
        self.weights: dict[str, OrtValue] = {}  # large constants, outside of the graph's own bytes
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._names = 0
        self._output_names: dict[str, str] = {}

    def __call__(
        self, operator: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        names = [self._name() for _ in range(outputs)]
        node = helper.make_node(operator, inputs, names, domain=domain, **attributes)
        self._nodes.append(node)
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = None) -> str:
        """A small constant."""
        name = self._name()
        array = np.asarray(value, dtype)
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def shape(self, *sizes: int) -> str:
        """A shape, or axes: int64."""
        return self.constant(sizes, np.int64)

    def weight(self, tensor: Tensor) -> str:
        """A large constant."""
        name = self._name()
        array = tensor.detach().numpy().copy(order="C")  # a copy: a view would keep all of a file
        self.weights[name] = OrtValue.ortvalue_from_numpy(array)
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto = TensorProto(name=name, dims=array.shape, data_type=dtype)
        proto.data_location = TensorProto.EXTERNAL
        proto.external_data.add(key="location", value="memory")
        self._constants.append(proto)
        return name

    def input(
        self, name: str, shape: Sequence[str | int], dtype: torch.dtype = torch.float32
    ) -> str:
        """An input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return name

    def output(
        self, value: str, name: str, shape: Sequence[str | int], dtype: torch.dtype = torch.float32
    ) -> None:
        """Return a value under a name of its own."""
        self._output_names[value] = name
        self._outputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))

    def serialized(self) -> bytes:
        """The graph without its weights."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [self._output_names.get(name, name) for name in names]
        graph = helper.make_graph(
            self._nodes, "layers", self._inputs, self._outputs, self._constants
        )
        opsets = [helper.make_opsetid(*each) for each in OPSETS.items()]
        serialized: bytes = helper.make_model(
            graph, opset_imports=opsets, ir_version=10
        ).SerializeToString()
        return serialized

    def _name(self) -> str:
        self._names += 1
        return f"n{self._names}"


class Program:
    """A graph that ONNX Runtime runs, with as many threads as torch has, until it is settled.
    nbytes: of its weights, which a run reads.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph.serialized()
        self._weights = graph.weights
        self.nbytes = sum(each.tensor_size_in_bytes() for each in graph.weights.values())
        self._opened: dict[int, BoundSession] = {}  # by their threads
        self._settled: BoundSession | None = None

    def __deepcopy__(self, memo: Any) -> Program:
        """The same, as it is frozen."""
        return self

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Run it. All tensors are contiguous; outputs are written, and may be some of all."""
        session = self._settled or self._open(torch.get_num_threads())
        session(inputs, outputs)

    def settle(self) -> None:
        """Keep the present number of threads, and free what another one would need."""
        self._settled = self._settled or self._open(torch.get_num_threads())
        self._opened = {}
        # it has laid them out anew; the others are used as they are
        for name in [name for name, each in self._weights.items() if "int8" in each.data_type()]:
            del self._weights[name]

    def _open(self, threads: int) -> BoundSession:
        if threads not in self._opened:
            options = SessionOptions()
            options.intra_op_num_threads = threads
            # between two calls, cores are torch's
            options.add_session_config_entry("session.force_spinning_stop", "1")
            options.log_severity_level = 3
            options.add_external_initializers([*self._weights], [*self._weights.values()])
            self._opened[threads] = BoundSession(InferenceSession(self._graph, options))
        return self._opened[threads]


class BoundSession:
    """A session that remembers where its inputs and outputs are: most are where they were."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._bound: dict[str, tuple[int, torch.Size]] = {}
        self._outputs: set[str] = set()
        self._lock = Lock()

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Run the session; see `Program`."""
        with self._lock:
            if self._outputs != outputs.keys():
                self._binding.clear_binding_outputs()
                self._outputs = {*outputs}
                self._bound = {}
            self._bind(self._binding.bind_input, inputs)
            self._bind(self._binding.bind_output, outputs)
            self._session.run_with_iobinding(self._binding)

    def _bind(self, bind: Callable[..., None], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            place = (tensor.data_ptr(), tensor.shape)
            if self._bound.get(name) != place:
                bind(name, "cpu", 0, TYPES[tensor.dtype], tensor.shape, place[0])
                self._bound[name] = place
