// The drawing as data: a cluster with an identity for every node and GPU, its history, and the edits. Knows no element of
// the page. Bandwidths in bytes/s, memory in bytes, rates in FLOP/s, times in seconds, as the engine has them.

let lastId = 0;
const freshId = () => `i${++lastId}`;

function drawingOf(cluster) {
  const drawing = structuredClone(cluster);
  for (const node of drawing.nodes) {
    node.id = freshId();
    for (const gpu of node.gpus) gpu.id = freshId();
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

// Equal whatever the order of the keys, and whether an absent value is null or missing.
function sameCluster(one, other) {
  const plain = (value) => {
    if (Array.isArray(value)) return value.map(plain);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.keys(value).sort().filter((key) => value[key] !== null).map((key) => [key, plain(value[key])]));
  };
  return JSON.stringify(plain(one)) === JSON.stringify(plain(other));
}

class Board {
  constructor(cluster) {
    this.drawing = drawingOf(cluster);
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

  // One step of the history. `change` gets a copy; a change that ends where it began, or that leaves no GPU, is none.
  edit(change) {
    const next = structuredClone(this.drawing);
    change(next);
    next.nodes = next.nodes.filter((node) => node.gpus.length);
    if (!next.nodes.length || JSON.stringify(next) === JSON.stringify(this.drawing)) return false;
    this.past.push(this.drawing);
    if (this.past.length > 200) this.past.shift();
    this.future = [];
    this.adopt(next);
    return true;
  }

  adopt(drawing) {
    this.drawing = drawing;
    const known = new Set([...drawing.nodes.map((node) => node.id), ...this.gpus.map((gpu) => gpu.id), "fabric"]);
    for (const node of drawing.nodes) known.add(`link ${node.id}`);
    for (const id of this.selected) if (!known.has(id)) this.selected.delete(id);
  }

  // A cluster that was changed elsewhere: an edit like any other, which can be undone.
  replace(cluster) {
    if (sameCluster(cluster, clusterOf(this.drawing))) return false;
    this.past.push(this.drawing);
    this.future = [];
    this.adopt(drawingOf(cluster));
    return true;
  }

  undo() {
    if (!this.past.at(-1)?.nodes.length) return false; // not to before the first GPU: there is no empty cluster
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

  // Adds GPUs to the node with this id, or to a new node of their own. Returns their ids.
  add(gpus, nodeId = null) {
    const added = gpus.map((gpu) => ({ ...structuredClone(gpu), id: freshId() }));
    this.edit((drawing) => {
      let node = drawing.nodes.find((one) => one.id === nodeId);
      if (!node) drawing.nodes.push((node = emptyNode(drawing)));
      node.gpus.push(...added);
    });
    return added.map((gpu) => gpu.id);
  }

  move(ids, nodeId) {
    const moving = new Set(ids);
    return this.edit((drawing) => {
      const taken = drawing.nodes.flatMap((node) => node.gpus.filter((gpu) => moving.has(gpu.id)));
      let target = drawing.nodes.find((node) => node.id === nodeId);
      if (!target) drawing.nodes.push((target = emptyNode(drawing)));
      // Those that are at home already keep their places.
      const coming = taken.filter((gpu) => !target.gpus.includes(gpu));
      for (const node of drawing.nodes) if (node !== target) node.gpus = node.gpus.filter((gpu) => !moving.has(gpu.id));
      target.gpus.push(...coming);
    });
  }

  // `count` more of every selected node, or of the selected GPUs, each beside what it is a copy of.
  duplicate(count) {
    const nodes = new Set(this.selectedNodes.map((node) => node.id));
    const gpus = new Set(this.selectedGpus.map((gpu) => gpu.id));
    return this.edit((drawing) => {
      for (const node of [...drawing.nodes]) {
        if (nodes.has(node.id)) {
          const copies = Array.from({ length: count }, () => ({
            ...structuredClone(node), id: freshId(), gpus: node.gpus.map((gpu) => ({ ...gpu, id: freshId() })),
          }));
          drawing.nodes.splice(drawing.nodes.indexOf(node) + 1, 0, ...copies);
          for (const copy of copies) copy.name = newName(drawing, node.name, copy);
        } else {
          node.gpus = node.gpus.flatMap((gpu) =>
            gpus.has(gpu.id)
              ? [gpu, ...Array.from({ length: count }, () => ({ ...gpu, id: freshId() }))]
              : [gpu]);
        }
      }
    });
  }

  // Refused where nothing would be left.
  remove() {
    return this.edit((drawing) => {
      drawing.nodes = drawing.nodes.filter((node) => !this.selected.has(node.id));
      for (const node of drawing.nodes) node.gpus = node.gpus.filter((gpu) => !this.selected.has(gpu.id));
    });
  }

  setGpus(ids, values) {
    const wanted = new Set(ids);
    return this.edit((drawing) => {
      for (const node of drawing.nodes)
        node.gpus = node.gpus.map((gpu) => (wanted.has(gpu.id) ? { ...gpu, ...values, id: gpu.id } : gpu));
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

// `name` if no other node has it, otherwise with the next free number at its end.
function newName(drawing, name, own) {
  const taken = new Set(drawing.nodes.filter((node) => node !== own).map((node) => node.name));
  if (!taken.has(name)) return name;
  const stem = name.replace(/\s*\d+$/, "") || name;
  let number = 2;
  while (taken.has(`${stem} ${number}`)) number += 1;
  return `${stem} ${number}`;
}
