"""The names that a Jinja2 template expects from outside."""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import meta, nodes


def outside_names(tree: nodes.Template) -> frozenset[str]:
    """Names that a template reads where it need not have set them itself.

    Jinja's own `find_undeclared_variables` takes a name that every branch of an `if` sets for undeclared. Here it is
    one only where a read can come first, as in `{% if x is not defined %}{% set x = 1 %}{% endif %}`.
    """
    reads = _Reads()
    reads.visit(tree.body, set())
    return frozenset(reads.outside & meta.find_undeclared_variables(tree))


class _Reads:
    """Follows a template as it is rendered; `known` are the names that are set for certain."""

    def __init__(self) -> None:
        self.outside: set[str] = set()

    def visit(self, tree: Iterable[nodes.Node | None], known: set[str]) -> None:
        for node in tree:
            if node is not None:
                self._node(node, known)

    def _node(self, node: nodes.Node, known: set[str]) -> None:
        match node:
            case nodes.Name(name=name, ctx="load"):
                if name not in known:
                    self.outside.add(name)
            case nodes.Name(name=name):
                known.add(name)
            case nodes.Assign():
                self.visit((node.node, node.target), known)
            case nodes.AssignBlock():
                self.visit((node.filter, *node.body), set(known))
                self.visit((node.target,), known)
            case nodes.If():
                self._if(node, known)
            case nodes.For():
                self.visit((node.iter,), known)
                self.visit((node.target, node.test, *node.body), {*known, "loop"})
                self.visit(node.else_, set(known))
            case nodes.Macro(name=name):
                known.add(name)
                self.visit((*node.defaults, *node.args, *node.body), set(known))
            case nodes.CallBlock():
                self.visit((node.call, *node.defaults, *node.args, *node.body), set(known))
            case nodes.Scope() | nodes.Block() | nodes.FilterBlock() | nodes.With():
                self.visit(node.iter_child_nodes(), set(known))
            case _:
                self.visit(node.iter_child_nodes(), known)

    def _if(self, node: nodes.If, known: set[str]) -> None:
        branches = []
        for test, body in ((node.test, node.body), *((other.test, other.body) for other in node.elif_)):
            self.visit((test,), known)
            branches.append(set(known))
            self.visit(body, branches[-1])
        branches.append(set(known))
        self.visit(node.else_, branches[-1])
        known |= set.intersection(*branches)
