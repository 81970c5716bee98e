// Draws parts of timelines closer, and says what the pointer is on. Without this script the page shows all of them.
document.documentElement.classList.add("js");
const LEFT = 96, RIGHT = 22, WIDTH = 1030, LANE = 30, BAR = 20, AXIS = 24, KINDS = ["local", "exchange", "waited"];
const escaped = (text) => text.replace(/[&<>"]/g, (c) => "&#" + c.charCodeAt(0) + ";");
const spoken = (ms) => ms >= 999.5 ? (ms / 1e3).toPrecision(3) + " s" : ms >= 0.9995 ? ms.toPrecision(3) + " ms" : (ms * 1e3).toPrecision(3) + " µs";

for (const figure of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const drawings = [...figure.querySelectorAll("svg")], kept = drawings.map((svg) => svg.innerHTML);
  const [closer, wider, earlier, later, all] = figure.querySelectorAll("button");
  const info = figure.querySelector(".info"), span = figure.querySelector(".span");
  let low = 0, high = data.most;

  const lane = ([label, bars], row, scale) => {
    const y = row * LANE + (LANE - BAR) / 2, shapes = [], open = {};
    for (const [begin, length, kind, name] of bars) {
      const end = begin + length;
      if (end < low || begin > high) continue;
      const thin = length * scale < 1, last = open[kind];
      if (thin && last && (end - last.begin) * scale < 2) {
        last.end = Math.max(last.end, end);
        last.count++;
        continue;
      }
      const bar = { begin, end, kind, name, count: 1 };
      shapes.push(bar);
      open[kind] = thin ? bar : null;
    }
    const rects = shapes.map((bar) => {
      const from = Math.max(bar.begin, low), to = Math.min(bar.end, high), width = Math.max((to - from) * scale, 0.5);
      const more = bar.count > 1 ? ` and ${bar.count - 1} more` : "";
      const tip = escaped(`${bar.name}${more}: ${spoken(bar.end - bar.begin)}, from ${bar.begin.toFixed(3)} ms`);
      const x = LEFT + (from - low) * scale;
      const shown = width > 46 ? `<text class="tiny in-local" x="${x + 4}" y="${y + 14}" pointer-events="none">${escaped(bar.name.slice(0, Math.floor((width - 8) / 6)))}</text>` : "";
      return `<rect class="bar ${KINDS[bar.kind]}${width > 5 ? " apart" : ""}" x="${x.toFixed(2)}" y="${y}" width="${width.toFixed(2)}" height="${BAR}"><title>${tip}</title></rect>${shown}`;
    });
    return `<text x="${LEFT - 8}" y="${y + BAR / 2 + 4}" class="small" text-anchor="end">${escaped(label)}</text>` +
      `<line class="grid" x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${y + BAR}" y2="${y + BAR}"/>` + rects.join("");
  };

  const draw = () => {
    const whole = low <= 0 && high >= data.most, scale = (WIDTH - LEFT - RIGHT) / (high - low);
    wider.disabled = all.disabled = whole;
    earlier.disabled = low <= 0;
    later.disabled = high >= data.most;
    span.textContent = whole ? "" : `${low.toFixed(3)} to ${high.toFixed(3)} ms`;
    drawings.forEach((svg, at) => {
      if (whole) return void (svg.innerHTML = kept[at]);
      const lanes = data.timelines[at], bottom = LANE * lanes.length, power = 10 ** Math.floor(Math.log10((high - low) / 10));
      const step = [1, 2, 5, 10].map((f) => f * power).find((s) => (high - low) / s <= 10), lines = [];
      for (let n = Math.ceil(low / step); n * step <= high; n++) {
        const x = (LEFT + (n * step - low) * scale).toFixed(2);
        lines.push(`<line class="grid" x1="${x}" x2="${x}" y1="0" y2="${bottom}"/><text class="tiny muted" text-anchor="middle" x="${x}" y="${bottom + AXIS - 8}">${+(n * step).toPrecision(6)}</text>`);
      }
      svg.innerHTML = lines.join("") + lanes.map((one, row) => lane(one, row, scale)).join("");
    });
  };
  const show = (from, to) => {
    const size = Math.min(Math.max(to - from, data.most * 1e-5), data.most);
    low = Math.min(Math.max(from, 0), data.most - size);
    high = low + size;
    draw();
  };
  const around = (factor) => show((low + high) / 2 - (high - low) * factor / 2, (low + high) / 2 + (high - low) * factor / 2);
  closer.onclick = () => around(0.25);
  wider.onclick = () => around(4);
  earlier.onclick = () => show(low - (high - low) / 2, high - (high - low) / 2);
  later.onclick = () => show(low + (high - low) / 2, high + (high - low) / 2);
  all.onclick = () => show(0, data.most);

  for (const svg of drawings) {
    const at = (event) => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
      return low + Math.min(Math.max((x - LEFT) / (WIDTH - LEFT - RIGHT), 0), 1) * (high - low);
    };
    let from = null, mark = null;
    svg.onpointerdown = (event) => {
      if (event.pointerType === "touch") return;
      from = at(event);
      mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      mark.setAttribute("class", "marked");
      mark.setAttribute("height", svg.viewBox.baseVal.height - AXIS);
      svg.append(mark);
      svg.setPointerCapture(event.pointerId);
    };
    svg.onpointermove = (event) => {
      if (from !== null) {
        const to = at(event), scale = (WIDTH - LEFT - RIGHT) / (high - low);
        mark.setAttribute("x", LEFT + (Math.min(from, to) - low) * scale);
        mark.setAttribute("width", Math.abs(to - from) * scale);
        return;
      }
      const tip = event.target.tagName === "rect" && event.target.querySelector("title");
      info.textContent = tip ? tip.textContent : "";
    };
    svg.onpointerup = (event) => {
      if (from === null) return;
      const to = at(event), first = from;
      mark.remove();
      from = null;
      if (Math.abs(to - first) * (WIDTH - LEFT - RIGHT) / (high - low) > 4) show(Math.min(first, to), Math.max(first, to));
    };
    svg.onpointercancel = () => { mark?.remove(); from = null; };
    svg.ondblclick = () => show(0, data.most);
  }
  draw();
}
