// Which part of the drawing the board shows, and with how much writing.

const LARGEST = 1.25; // pixels a unit when fitted: a small drawing is not blown up
const READABLE = 11; // pixels of the letters that stay when the drawing is small

class View {
  constructor(svg) {
    this.svg = svg;
    this.fitted = true; // until a person moves or zooms
    this.layout = null;
  }

  get scale() {
    return this.svg.clientWidth / this.box.width;
  }

  // The layout that is drawn now. A view that was fitted stays so.
  show(layout) {
    this.layout = layout;
    if (this.fitted || !this.box) this.fit();
    else this.write();
  }

  fit() {
    const { clientWidth: wide, clientHeight: high } = this.svg;
    if (!wide || !high) return; // not on the page yet
    const left = -26, top = -16, width = this.layout.width + 44, height = this.layout.height + 30;
    const scale = Math.min(LARGEST, wide / width, high / height);
    this.fitted = true;
    this.apply({
      x: left - (wide / scale - width) / 2, y: top - (high / scale - height) / 2, width: wide / scale, height: high / scale,
    });
  }

  apply(box) {
    this.box = box;
    this.svg.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
    this.write();
  }

  // The size of the board on the page changed.
  resize() {
    const { clientWidth: wide, clientHeight: high } = this.svg;
    if (!wide || !high) return;
    if (this.fitted || !this.box) this.fit();
    else this.apply({ ...this.box, height: this.box.width * high / wide });
  }

  // factor above 1: less is seen, larger. at: the point that stays where it is.
  zoom(factor, at = null) {
    const box = this.box, middle = at ?? { x: box.x + box.width / 2, y: box.y + box.height / 2 };
    const scale = Math.min(4, Math.max(0.02, this.scale * factor)), real = this.scale / scale;
    this.fitted = false;
    this.apply({
      x: middle.x - (middle.x - box.x) * real, y: middle.y - (middle.y - box.y) * real,
      width: box.width * real, height: box.height * real,
    });
  }

  // The view `from`, moved by pixels.
  pan(from, x, y) {
    this.fitted = false;
    this.apply({ ...this.box, x: from.x - x / this.scale, y: from.y - y / this.scale });
  }

  // Moves just so far that a box is seen.
  reveal({ x, y, width, height }) {
    if (this.fitted) return; // all is seen
    const box = this.box, margin = 20;
    const shift = (low, size, from, seen) => Math.min(0, low - margin - from) || Math.max(0, low + size + margin - from - seen);
    const right = shift(x, width, box.x, box.width), down = shift(y, height, box.y, box.height);
    if (right || down) this.apply({ ...box, x: box.x + right, y: box.y + down });
  }

  point(event) {
    return new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
  }

  // Text that can be read at this size: all; the names of nodes and types; the names of nodes alone.
  write() {
    const level = this.scale > 0.72 ? "near" : this.scale > 0.4 ? "middle" : "far";
    const letters = level === "near" ? null : READABLE / this.scale;
    this.svg.dataset.level = level;
    this.svg.style.setProperty("--letters", `${letters ?? 13}px`);
    for (const node of this.layout.nodes) {
      set(node.title, fitted(node.name, node.width - 2 * PAD, letters ?? 13));
      if (level !== "far") for (const gpu of node.gpus) set(gpu.title, fitted(gpu.name, CELL.width - 12, letters ?? 13));
    }
  }
}

function set(text, content) {
  if (text.textContent !== content) text.textContent = content;
}

// Text cut to about `width` at letters of this size; a hover shows the rest.
function fitted(text, width, letters) {
  const most = Math.max(2, Math.floor(width / letters / 0.56));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
