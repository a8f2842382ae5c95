// The board on the page: pointer, keyboard, zoom, and the word with Python. Called again at every rerun, so everything that
// has to stay lives in `Studio`, which is kept on the element.

const NEAR = 4; // pixels that a pointer may wander and still click

class Studio {
  constructor(root, data) {
    this.root = root;
    this.find = (part) => root.querySelector(`[data-part="${part}"]`);
    this.svg = this.find("board");
    this.layer = this.find("layer");
    this.board = new Board(data.cluster);
    this.serial = data.answered;
    this.focused = null;
    this.view = null;
    this.listen();
    this.take(data);
    this.fit();
  }

  // What Python says now. An answer to an edit that was not the last one is out of date.
  take(data, send) {
    this.send = send ?? this.send;
    this.types = data.types;
    this.overlay = data.overlay;
    if (data.answered >= this.serial) {
      this.serial = data.answered;
      if (this.board.replace(data.cluster)) this.say("The drawing follows the table.");
    }
    this.fillPalette();
    this.draw();
  }

  change(edit) {
    if (edit() === false) return;
    this.serial += 1;
    this.draw();
    this.send?.("edit", { serial: this.serial, cluster: clusterOf(this.board.drawing) });
  }

  draw() {
    const counts = this.board.gpus.length === (this.overlay?.gpus.length ?? -1);
    this.layout = draw(this.layer, this.board.drawing, this.types, counts ? this.overlay : null);
    this.show();
  }

  // Selection, focus, buttons: all that may change without the drawing.
  show() {
    const items = this.items();
    if (!items.some((one) => one.dataset.id === this.focused)) this.focused = items[0]?.dataset.id ?? null;
    for (const one of items) {
      const chosen = this.board.selected.has(one.dataset.id);
      one.classList.toggle("selected", chosen);
      one.setAttribute("aria-pressed", String(chosen));
      one.setAttribute("tabindex", one.dataset.id === this.focused ? "0" : "-1");
    }
    inspect(this.find("inspector"), this.board, this.types, (edit) => this.change(edit));
    this.find("undo").disabled = !this.board.past.at(-1)?.nodes.length;
    this.find("redo").disabled = !this.board.future.length;
    const nodes = this.board.drawing.nodes.length, gpus = this.board.gpus.length;
    this.find("count").textContent = !gpus ? "Nothing drawn yet" : `${gpus} GPU${gpus > 1 ? "s" : ""} in ${nodes} node${nodes > 1 ? "s" : ""}`;
  }

  items() {
    // In reading order: every node, its GPUs, its link; then the fabric.
    const found = new Map([...this.layer.querySelectorAll(".item")].map((one) => [one.dataset.id, one]));
    const order = this.board.drawing.nodes.flatMap((node) => [node.id, ...node.gpus.map((gpu) => gpu.id), `link ${node.id}`]);
    return [...order, "fabric"].map((id) => found.get(id)).filter(Boolean);
  }

  say(text) {
    this.find("said").textContent = text;
  }

  fillPalette() {
    const known = Object.keys(this.types).join();
    if (this.palette === known) return;
    this.palette = known;
    this.find("palette").replaceChildren(...Object.entries(this.types).map(([name, type]) => {
      const one = html("button", { type: "button", title: `Drag onto the board, or press to add: ${name}`, "data-type": name }, [
        html("span", { className: "swatch", "aria-hidden": "true" }), html("span", { textContent: name }),
      ]);
      one.firstChild.style.background = type.colour;
      return one;
    }));
  }

  addType(name, nodeId) {
    this.change(() => {
      const added = this.board.add([this.types[name].gpu], nodeId);
      this.board.selected = new Set(added);
      this.focused = added[0];
      this.say(`Added ${name} to ${this.board.nodeOf(added[0]).name}.`);
    });
  }

  // Zoom and pan: the part of the drawing that the board shows.

  fit() {
    const { width, height } = this.layout;
    this.view = { x: -30, y: -34, width: Math.max(width + 50, 420), height: Math.max(height + 40, 260) };
    this.applyView();
  }

  applyView() {
    const { x, y, width, height } = this.view;
    this.svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  }

  zoom(factor, at = null) {
    const view = this.view, middle = at ?? { x: view.x + view.width / 2, y: view.y + view.height / 2 };
    const width = Math.min(40000, Math.max(200, view.width * factor)), real = width / view.width;
    this.view = {
      x: middle.x - (middle.x - view.x) * real, y: middle.y - (middle.y - view.y) * real, width, height: view.height * real,
    };
    this.applyView();
  }

  point(event) {
    return new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
  }

  nodeAt(point) {
    return this.layout.nodes.find((box) =>
      point.x >= box.x && point.x <= box.x + box.width && point.y >= box.y && point.y <= box.y + box.height);
  }

  listen() {
    const { svg } = this;
    svg.addEventListener("pointerdown", (event) => this.press(event));
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a page that is scrolled must not get stuck here
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, this.point(event));
    }, { passive: false });
    svg.addEventListener("focusin", (event) => {
      const one = event.target.closest?.(".item");
      if (one) this.focused = one.dataset.id;
    });
    this.find("palette").addEventListener("pointerdown", (event) => this.pressPalette(event));
    this.find("palette").addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.type;
      // A pointer's click was dealt with when it was let go.
      if (name && event.detail === 0) this.addType(name, this.targetNode());
    });
    this.find("studio").addEventListener("keydown", (event) => this.key(event));
    const acts = {
      undo: () => this.travel(this.board.undo()), redo: () => this.travel(this.board.redo()), fit: () => this.fit(),
      "zoom-in": () => this.zoom(1 / 1.3), "zoom-out": () => this.zoom(1.3),
    };
    for (const [part, act] of Object.entries(acts)) this.find(part).addEventListener("click", act);
  }

  // Where a new GPU goes: into the node that is selected, or whose GPU is.
  targetNode() {
    const [first] = this.board.selected;
    return first ? this.board.nodeOf(first.replace("link ", ""))?.id ?? null : null;
  }

  travel(moved) {
    if (moved) this.change(() => true);
  }

  select(id, more) {
    const { selected } = this.board;
    if (!more) {
      selected.clear();
      selected.add(id);
    } else if (!selected.delete(id)) {
      selected.add(id);
    }
    this.focused = id;
    this.show();
  }

  // A press on the board: a click selects, a drag moves GPUs, an area (with Shift) or the view.
  press(event) {
    if (event.button) return;
    const hit = event.target.closest?.(".item"), from = this.point(event), view = { ...this.view };
    const more = event.shiftKey || event.ctrlKey || event.metaKey;
    const dragged = hit?.dataset.kind === "gpu" && !more;
    const area = !hit && event.shiftKey ? element("rect", { class: "area" }) : null;
    let moved = false;
    const ghost = element("g", { class: "ghost" });
    follow(this.svg, event, (now) => {
      if (!moved && Math.hypot(now.clientX - event.clientX, now.clientY - event.clientY) < NEAR) return;
      const at = this.point(now);
      if (!moved) {
        moved = true;
        if (dragged) this.lift(hit.dataset.id, ghost);
        if (area) this.layer.append(area);
      }
      if (dragged) this.hover(at, ghost);
      else if (area) stretch(area, from, at);
      else if (!hit) {
        // In the view as it was: the point under the pointer stays under it.
        const scale = view.width / this.svg.clientWidth, tall = view.height / this.svg.clientHeight, real = Math.max(scale, tall);
        this.view.x = view.x - (now.clientX - event.clientX) * real;
        this.view.y = view.y - (now.clientY - event.clientY) * real;
        this.applyView();
      }
    }, (last, finished) => {
      ghost.remove();
      area?.remove();
      this.mark(null);
      if (!finished) return;
      if (!moved && hit) {
        hit.focus();
        this.select(hit.dataset.id, more);
      } else if (!moved && !more) {
        this.board.selected.clear();
        this.show();
      } else if (moved && dragged) {
        const target = this.nodeAt(this.point(last));
        this.change(() => this.board.move(this.lifted, target?.id ?? null));
      } else if (moved && area) {
        this.selectArea(from, this.point(last));
      }
    });
  }

  pressPalette(event) {
    const chosen = event.target.closest("button");
    if (!chosen || event.button) return;
    const name = chosen.dataset.type, ghost = element("g", { class: "ghost" });
    let moved = false;
    follow(chosen, event, (now) => {
      if (!moved && Math.hypot(now.clientX - event.clientX, now.clientY - event.clientY) < NEAR) return;
      if (!moved) {
        moved = true;
        ghost.append(element("rect", { class: "chip", width: CELL.width, height: CELL.height, rx: 4, fill: this.types[name].colour }));
        this.layer.append(ghost);
      }
      this.hover(this.point(now), ghost);
    }, (last, finished) => {
      ghost.remove();
      this.mark(null);
      if (!finished) return;
      if (!moved) {
        this.addType(name, this.targetNode());
        return;
      }
      const frame = this.svg.getBoundingClientRect();
      const inside = last.clientX >= frame.left && last.clientX <= frame.right && last.clientY >= frame.top && last.clientY <= frame.bottom;
      if (inside) this.addType(name, this.nodeAt(this.point(last))?.id ?? null);
    });
  }

  // A GPU that is dragged takes the other selected ones along if it is one of them.
  lift(id, ghost) {
    if (!this.board.selected.has(id)) this.select(id, false);
    this.lifted = this.board.selectedGpus.map((gpu) => gpu.id);
    const chip = this.layer.querySelector(`[data-id="${id}"] .chip`);
    ghost.append(element("rect", { class: "chip", width: CELL.width, height: CELL.height, rx: 4, fill: chip.getAttribute("fill") }));
    if (this.lifted.length > 1) ghost.append(element("text", { class: "name", x: 8, y: 32 }, `${this.lifted.length} GPUs`));
    this.layer.append(ghost);
  }

  hover(at, ghost) {
    ghost.setAttribute("transform", `translate(${at.x - CELL.width / 2} ${at.y - CELL.height / 2})`);
    this.mark(this.nodeAt(at)?.id ?? null);
  }

  mark(id) {
    for (const one of this.layer.querySelectorAll(".node")) one.classList.toggle("target", one.dataset.id === id);
  }

  selectArea(one, other) {
    const [left, right] = [Math.min(one.x, other.x), Math.max(one.x, other.x)];
    const [top, bottom] = [Math.min(one.y, other.y), Math.max(one.y, other.y)];
    this.board.selected.clear();
    for (const box of this.layout.nodes)
      for (const gpu of box.gpus)
        if (gpu.x < right && gpu.x + CELL.width > left && gpu.y < bottom && gpu.y + CELL.height > top) this.board.selected.add(gpu.id);
    this.show();
    this.say(`${this.board.selected.size} GPUs selected.`);
  }

  key(event) {
    const control = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
    const typing = event.composedPath()[0].matches?.("input, select");
    if (control && key === "z" && !typing) this.travel(event.shiftKey ? this.board.redo() : this.board.undo());
    else if (control && key === "y" && !typing) this.travel(this.board.redo());
    else if (typing) {
      if (key === "escape") this.focusItem(this.focused);
      return;
    } else if (!event.composedPath().includes(this.svg)) return;
    else if (control && key === "a") {
      this.board.selected = new Set(this.board.gpus.map((gpu) => gpu.id));
      this.show();
    } else if (control && key === "d") this.change(() => this.board.duplicate(1));
    else if (control) return;
    else if (!this.plainKey(key)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  plainKey(key) {
    const items = this.items(), at = items.findIndex((one) => one.dataset.id === this.focused);
    const headers = items.filter((one) => one.dataset.kind === "node" || one.dataset.kind === "fabric");
    const go = (one) => one && this.focusItem(one.dataset.id);
    if (key === "arrowright") go(items[at + 1]);
    else if (key === "arrowleft") go(items[at - 1]);
    else if (key === "arrowdown") go(headers.find((one) => items.indexOf(one) > at));
    else if (key === "arrowup") go(headers.findLast((one) => items.indexOf(one) < at));
    else if (key === "home") go(items[0]);
    else if (key === "end") go(items.at(-1));
    else if (key === " ") this.toggle(this.focused);
    else if (key === "enter") {
      this.select(this.focused, false);
      this.find("inspector").querySelector("input, select, button")?.focus();
    } else if (key === "delete" || key === "backspace") this.removeSelected();
    else if (key === "escape") {
      this.board.selected.clear();
      this.show();
    } else if (key === "+" || key === "=") this.zoom(1 / 1.3);
    else if (key === "-") this.zoom(1.3);
    else if (key === "0") this.fit();
    else return false;
    return true;
  }

  toggle(id) {
    this.select(id, true);
    this.focusItem(id);
  }

  removeSelected() {
    const before = this.board.past.length;
    this.change(() => this.board.remove());
    if (this.board.past.length === before && this.board.selected.size) this.say("A cluster keeps at least one GPU.");
    this.focusItem(this.focused);
  }

  focusItem(id) {
    this.focused = id;
    this.show();
    this.items().find((one) => one.dataset.id === id)?.focus();
  }
}

// Follow a pointer from its press until it is let go. done(last event, whether it was let go and not taken away).
function follow(target, press, move, done) {
  target.setPointerCapture(press.pointerId);
  const mine = (event) => event.pointerId === press.pointerId;
  const onMove = (event) => mine(event) && move(event);
  const end = (event) => {
    if (!mine(event)) return;
    for (const [name, listener] of listeners) target.removeEventListener(name, listener);
    done(event, event.type === "pointerup");
  };
  const listeners = [["pointermove", onMove], ["pointerup", end], ["pointercancel", end]];
  for (const [name, listener] of listeners) target.addEventListener(name, listener);
}

function stretch(area, from, to) {
  area.setAttribute("x", Math.min(from.x, to.x));
  area.setAttribute("y", Math.min(from.y, to.y));
  area.setAttribute("width", Math.abs(from.x - to.x));
  area.setAttribute("height", Math.abs(from.y - to.y));
}

export default function ({ parentElement, data, setStateValue }) {
  const studio = (parentElement.studio ??= new Studio(parentElement, data));
  studio.take(data, setStateValue);
}
