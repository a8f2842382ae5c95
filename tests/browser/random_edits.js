// 400 random edits of a `Board` (board.js comes before this), then all the way back and forth again. Returns what was wrong.

const pick = (list) => list[Math.floor(random() * list.length)];
const gpu = (type) => ({
  type, memory: 1, memory_bandwidth: 1, flops_fp32: 1, flops_fp16: 1, flops_fp8: 0, send_bandwidth: 1, receive_bandwidth: 1,
});
let seed = 7;
const random = () => ((seed = (seed * 48271) % 2147483647) / 2147483647);
const board = new Board(null), faults = [];
const check = (holds, what) => { if (!holds) faults.push(what); };
const states = [JSON.stringify(board.drawing)];
for (let step = 0; step < 400; step += 1) {
  const { nodes } = board.drawing, before = board.gpus.length;
  board.selected = new Set(board.gpus.filter(() => random() < 0.3).map((one) => one.id));
  for (const node of nodes) if (random() < 0.2) board.selected.add(node.id);
  const gpus = board.selectedGpus.map((one) => one.id), target = random() < 0.3 ? null : pick(nodes)?.id ?? null;
  const chosen = board.selectedNodes.flatMap((node) => node.gpus.map((one) => one.id));
  const reached = new Set([...gpus, ...chosen]).size;
  const [kind, changed, wanted] = pick([
    () => ["add", Boolean(board.add(gpu(pick(["A", "B"])), target)), before + 1],
    () => ["add", Boolean(board.add(gpu("C"), null)), before + 1],
    () => ["move", board.move(gpus, target), before],
    () => (before > 30
      ? ["remove", board.remove(), before - reached] : ["duplicate", board.duplicate(2), before + 2 * reached]),
    () => ["speed", board.setGpus(gpus, { send_bandwidth: step + 2 }), before],
    () => ["name", board.setNodes(nodes.slice(0, 2).map((one) => one.id), { name: pick(["x", "x 2", "dgx-0"]) }), before],
  ])();
  check(board.gpus.length === wanted, `${kind}: ${before} GPUs became ${board.gpus.length}, not ${wanted}`);
  const now = board.drawing.nodes, ids = [...now.map((one) => one.id), ...board.gpus.map((one) => one.id)];
  check(new Set(ids).size === ids.length, `${kind}: two things have one identity`);
  check(new Set(now.map((one) => one.name)).size === now.length, `${kind}: two nodes have one name`);
  check(now.every((one) => one.gpus.length && one.name), `${kind}: a node without GPUs or name`);
  check([...board.selected].every((id) => ids.includes(id)), `${kind}: something that has gone is selected`);
  if (changed) states.push(JSON.stringify(board.drawing));
  check(JSON.stringify(board.drawing) === states.at(-1), `${kind}: changed, but said not`);
}
const kept = states.slice(-1 - board.past.length);
check(kept.length === 101, `${kept.length} states are kept`);
for (const state of kept.slice(0, -1).reverse()) check(board.undo() && JSON.stringify(board.drawing) === state, "undo");
check(!board.undo(), "undo beyond the first");
for (const state of kept.slice(1)) check(board.redo() && JSON.stringify(board.drawing) === state, "redo");
check(!board.redo(), "redo beyond the last");

// What comes from elsewhere: the same cluster is no step, another one is; a refused edit leaves no trace.
const same = clusterOf(board.drawing), steps = board.past.length;
check(!board.replace({ latency: same.latency, ...structuredClone(same) }) && board.past.length === steps, "replaced by itself");
const first = board.drawing.nodes[0].id;
const other = structuredClone(same);
other.latency = 1;
check(board.replace(other) && board.drawing.nodes[0].id === first && board.undo(), "a node is known again by its name");
board.setGpus([board.gpus[0].id], { memory: -1 });
board.add(gpu("D"));
board.refuse(same);
check(JSON.stringify(clusterOf(board.drawing)) === JSON.stringify(same), "not back to before what was refused");
check(!JSON.stringify([board.past, board.future]).includes('"memory":-1'), "what was refused can be come back to");

// Another session's cluster is no step, and nothing before it can be come back to.
const elsewhere = new Board(other);
elsewhere.add(gpu("E"));
elsewhere.begin(same);
check(elsewhere.shows(same) && !elsewhere.undo() && !elsewhere.redo(), "another session's edits can be undone");

// What was made of a preset has its name no more, what has a person's name keeps it, and undo brings both back.
const named = new Board({ ...same, name: "dgx" });
named.presets = ["dgx", "pod"];
named.add(gpu("F"));
check(named.drawing.name === "dgx, changed", "a changed preset has its name");
named.add(gpu("F"));
check(named.drawing.name === "dgx, changed", "changed twice, said twice");
check(named.undo() && named.undo() && named.drawing.name === "dgx", "a preset that was come back to has its name");
named.clear();
check(named.drawing.name === "my cluster", "a new drawing has the name of a preset");
named.edit((drawing) => { drawing.name = "ours"; });
named.add(gpu("F"));
check(named.drawing.name === "ours", "a person's name is gone");

// The second GPU of a node brings the links of its type, and no other does.
const linked = new Board(null), link = (place) => linked.drawing.nodes[place]?.link_bandwidth ?? null;
linked.links = { A: { link_bandwidth: 5, link_latency: 1 }, B: null };
const first_a = linked.add(gpu("A")), home = linked.drawing.nodes[0].id;
check(link(0) === null, "one GPU has links");
linked.add(gpu("A"), home);
check(link(0) === 5 && linked.drawing.nodes[0].link_latency === 1, "two GPUs have none");
linked.setNodes([home], { link_bandwidth: null });
linked.add(gpu("A"), home);
check(link(0) === null, "links that were taken away came back");
linked.selected = new Set([home]);
linked.duplicate(1);
check(link(1) === null, "a copy of a node has links that the node has not");
linked.move([first_a, linked.gpus[1].id], null);
check(link(2) === 5, "two GPUs moved into a new node have none");
linked.add(gpu("B"), null);
linked.add(gpu("A"), linked.drawing.nodes[3].id);
check(link(3) === null, "a node of several types has links");
linked.add(gpu("A"), null);
linked.selected = new Set([linked.drawing.nodes[4].gpus[0].id]);
linked.duplicate(3);
check(link(4) === 5 && linked.drawing.nodes[4].gpus.length === 4, "copies of a GPU have none");
check(board.clear() && board.replace(null) === false && board.gpus.length === 0, "cleared");
return faults;
