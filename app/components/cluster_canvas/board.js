// The drawing as data: a cluster with an identity for every node and GPU, its history, and the edits. Knows no element of
// the page. Bandwidths in bytes/s, memory in bytes, rates in FLOP/s, times in seconds, as the engine has them.

const MOST_GPUS = 4096; // that copying may make: a slip of the finger must not freeze the page
const MOST_STEPS = 100; // that can be undone
const UNNAMED = "my cluster";

let lastId = 0;
const freshId = () => `i${++lastId}`;

// cluster: null for none. A part that `before` has too (a node by its name, a GPU by its place in it) keeps that part's
// identity, and with it its selection.
function drawingOf(cluster, before = null) {
  const drawing = structuredClone(cluster ?? { name: UNNAMED, nodes: [], latency: 0 });
  const known = new Map((before?.nodes ?? []).map((node) => [node.name, node]));
  for (const node of drawing.nodes) {
    const old = known.get(node.name);
    node.id = old?.id ?? freshId();
    node.gpus.forEach((gpu, place) => { gpu.id = old?.gpus[place]?.id ?? freshId(); });
  }
  return drawing;
}

function clusterOf(drawing) {
  const cluster = structuredClone(drawing);
  for (const node of cluster.nodes) {
    delete node.id;
    for (const gpu of node.gpus) delete gpu.id;
  }
  return cluster;
}

// Equal in any order of the keys; an absent value may be null or missing. null: no cluster at all.
function sameCluster(one, other) {
  const plain = (value) => {
    if (Array.isArray(value)) return value.map(plain);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.keys(value).sort().filter((key) => value[key] !== null).map((key) => [key, plain(value[key])]));
  };
  if (!one?.nodes.length || !other?.nodes.length) return !one?.nodes.length && !other?.nodes.length;
  return JSON.stringify(plain(one)) === JSON.stringify(plain(other));
}

class Board {
  constructor(cluster) {
    this.drawing = drawingOf(cluster);
    this.links = {}; // links that a node gets, by GPU type
    this.presets = []; // names that a changed cluster must not keep
    this.past = [];
    this.future = [];
    this.selected = new Set();
  }

  get gpus() {
    return this.drawing.nodes.flatMap((node) => node.gpus);
  }

  nodeOf(id) {
    return this.drawing.nodes.find((node) => node.id === id || node.gpus.some((gpu) => gpu.id === id));
  }

  get selectedGpus() {
    return this.gpus.filter((gpu) => this.selected.has(gpu.id));
  }

  get selectedNodes() {
    return this.drawing.nodes.filter((node) => this.selected.has(node.id));
  }

  get selectedLinks() {
    return this.drawing.nodes.filter((node) => this.selected.has(`link ${node.id}`));
  }

  // One step of the history. `change` gets a copy, and nodes that it leaves empty go; returns true if anything changed.
  edit(change) {
    const next = structuredClone(this.drawing);
    change(next);
    next.nodes = next.nodes.filter((node) => node.gpus.length);
    if (JSON.stringify(next) === JSON.stringify(this.drawing)) return false;
    if (next.name === this.drawing.name && this.presets.includes(next.name))
      next.name = next.nodes.length ? `${next.name}, changed` : UNNAMED;
    this.step(next);
    return true;
  }

  step(next) {
    this.past.push(this.drawing);
    if (this.past.length > MOST_STEPS) this.past.shift();
    this.future = [];
    this.adopt(next);
  }

  adopt(drawing) {
    this.drawing = drawing;
    const known = new Set(["fabric", ...this.gpus.map((gpu) => gpu.id)]);
    for (const node of drawing.nodes) known.add(node.id).add(`link ${node.id}`);
    for (const id of this.selected) if (!known.has(id)) this.selected.delete(id);
  }

  shows(cluster) {
    return sameCluster(cluster, clusterOf(this.drawing));
  }

  // A cluster that was changed elsewhere: an edit like any other, which can be undone.
  replace(cluster) {
    if (this.shows(cluster)) return false;
    this.step(drawingOf(cluster, this.drawing));
    return true;
  }

  // Another session's cluster: no earlier drawing can be brought back.
  begin(cluster) {
    this.past = [];
    this.future = [];
    this.adopt(drawingOf(cluster));
  }

  // Back to the cluster that was there before an edit that was refused; the refused steps are forgotten.
  refuse(cluster) {
    if (this.shows(cluster)) return;
    const last = this.past.findLastIndex((drawing) => sameCluster(cluster, clusterOf(drawing)));
    this.adopt(last < 0 ? drawingOf(cluster, this.drawing) : this.past[last]);
    if (last >= 0) this.past.length = last;
  }

  undo() {
    if (!this.past.length) return false;
    this.future.push(this.drawing);
    this.adopt(this.past.pop());
    return true;
  }

  redo() {
    if (!this.future.length) return false;
    this.past.push(this.drawing);
    this.adopt(this.future.pop());
    return true;
  }

  // Adds a GPU to the node with this id, or to a new node of its own. Returns its id.
  add(gpu, nodeId = null) {
    const added = { ...structuredClone(gpu), id: freshId() };
    this.edit((drawing) => {
      let node = drawing.nodes.find((one) => one.id === nodeId);
      if (!node) drawing.nodes.push((node = emptyNode(drawing)));
      this.grow(node, [...node.gpus, added]);
    });
    return added.id;
  }

  // The second GPU of a node brings the links that GPUs of their type come with. Later ones bring none: a person may have
  // taken the links away.
  grow(node, gpus) {
    const links = this.links[gpus[0].type], first = node.gpus.length < 2 && gpus.length > 1;
    if (links && first && !node.link_bandwidth && gpus.every((gpu) => gpu.type === gpus[0].type)) Object.assign(node, links);
    node.gpus = gpus;
  }

  // GPUs into the node with this id, or together into a new one.
  move(ids, nodeId) {
    const moving = new Set(ids);
    const alone = this.drawing.nodes.some(
      (node) => node.gpus.length === moving.size && node.gpus.every((gpu) => moving.has(gpu.id)));
    if (alone && nodeId === null) return false; // they have a node of their own already
    return this.edit((drawing) => {
      const taken = drawing.nodes.flatMap((node) => node.gpus.filter((gpu) => moving.has(gpu.id)));
      let target = drawing.nodes.find((node) => node.id === nodeId);
      if (!target) drawing.nodes.push((target = emptyNode(drawing)));
      // Those that are at home already keep their places.
      const coming = taken.filter((gpu) => !target.gpus.includes(gpu));
      for (const node of drawing.nodes) if (node !== target) node.gpus = node.gpus.filter((gpu) => !moving.has(gpu.id));
      this.grow(target, [...target.gpus, ...coming]);
    });
  }

  // `count` more of every selected node and of every selected GPU outside of those, each next to its original.
  duplicate(count) {
    const nodes = new Set(this.selectedNodes.map((node) => node.id));
    const gpus = new Set(this.selectedGpus.map((gpu) => gpu.id));
    const copies = (gpu) => Array.from({ length: count }, () => ({ ...gpu, id: freshId() }));
    const copied = this.drawing.nodes.flatMap((node) => node.gpus.filter((gpu) => nodes.has(node.id) || gpus.has(gpu.id)));
    if (this.gpus.length + count * copied.length > MOST_GPUS) return false;
    return this.edit((drawing) => {
      for (const node of [...drawing.nodes]) {
        if (!nodes.has(node.id)) {
          this.grow(node, node.gpus.flatMap((gpu) => (gpus.has(gpu.id) ? [gpu, ...copies(gpu)] : [gpu])));
          continue;
        }
        const more = Array.from({ length: count }, () => ({
          ...node, id: freshId(), gpus: node.gpus.map((gpu) => ({ ...gpu, id: freshId() })),
        }));
        drawing.nodes.splice(drawing.nodes.indexOf(node) + 1, 0, ...more);
        for (const copy of more) copy.name = newName(drawing, node.name, copy);
      }
    });
  }

  remove(ids = this.selected) {
    return this.edit((drawing) => {
      drawing.nodes = drawing.nodes.filter((node) => !ids.has(node.id));
      for (const node of drawing.nodes) node.gpus = node.gpus.filter((gpu) => !ids.has(gpu.id));
    });
  }

  clear() {
    return this.edit((drawing) => { drawing.nodes = []; });
  }

  setGpus(ids, values) {
    const wanted = new Set(ids);
    return this.edit((drawing) => {
      for (const node of drawing.nodes)
        node.gpus = node.gpus.map((gpu) => (wanted.has(gpu.id) ? { ...gpu, ...values } : gpu));
    });
  }

  setNodes(ids, values) {
    return this.edit((drawing) => {
      for (const node of drawing.nodes) {
        if (!ids.includes(node.id)) continue;
        Object.assign(node, values);
        if ("name" in values) node.name = newName(drawing, values.name, node);
      }
    });
  }
}

function emptyNode(drawing) {
  const node = { id: freshId(), name: "", link_bandwidth: null, link_latency: 0, gpus: [] };
  node.name = newName(drawing, "node 1", node);
  return node;
}

// `name` if no other node has it, otherwise with the next free number at its end: "dgx-0" → "dgx-1", "big" → "big 2".
function newName(drawing, name, own) {
  const taken = new Set(drawing.nodes.filter((node) => node !== own).map((node) => node.name));
  if (!taken.has(name)) return name;
  const [, stem, digits] = name.match(/^(.*?)(\d*)$/s);
  let number = digits ? Number(digits) + 1 : 2;
  const numbered = () => {
    const end = digits ? String(number) : ` ${number}`;
    return stem.slice(0, 60 - end.length) + end;
  };
  while (taken.has(numbered())) number += 1;
  return numbered();
}
