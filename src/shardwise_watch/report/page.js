// A chart tells its values at the pointer, at a touch, and by the arrow keys; so does the picture of the ranks.
function number(value, digits = 5) {
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function said(shown, row) {
  const unit = (value, digits) => (shown.percent ? (100 * value).toFixed(1) + " %" : number(value, digits) + (shown.suffix || ""));
  const seconds = (value) => (value < 1 ? number(1000 * value, 3) + " ms" : number(value, 3) + " s");
  if (shown.names) return shown.names.map((name, at) => name + " " + seconds(row[at + 1])).join(", ");
  const [, least, mean, largest] = row;
  return mean === undefined ? unit(least) : unit(mean) + " (" + unit(least, 4) + " to " + unit(largest, 4) + ")";
}

for (const figure of document.querySelectorAll("[data-chart]")) {
  const shown = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg"), [low, high] = shown.ends;
  const cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  const whole = svg.viewBox.baseVal.width, left = {{ left }}, width = whole - left - {{ right }};
  const all = Object.entries(shown.names ? { "": shown.rows } : shown.curves).filter(([, rows]) => rows.length);
  let curves = all, row = 0;
  function choose(number) {
    // The cells of a map stand in rows, of which one is told.
    row = Math.min(all.length - 1, Math.max(0, number));
    if (shown.is_map) curves = [all[row]];
  }
  choose(0);
  const isOdd = (name, x) => shown.breaks?.[name]?.[0] <= x && x <= shown.breaks[name][1];
  const first = curves.length ? curves[0][1] : [];
  let at = first.length - 1;
  const near = (rows, x) => rows.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
  function tell(x) {
    const values = curves.map(([name, rows]) => {
      const row = near(rows, x), isThere = Math.abs(row[0] - x) <= (2 * (high - low)) / rows.length;
      return (all.length > 1 ? name + " " : "") + (isThere ? said(shown, row) : isOdd(name, x) ? "not finite" : "–");
    });
    output.textContent = (shown.axis || "step") + " " + Math.round(x).toLocaleString("en") + ": " + values.join(", ");
  }
  function show(x) {
    const place = left + (high > low ? (x - low) / (high - low) : 0.5) * width;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, place);
    cursor.setAttribute("visibility", "visible");
    tell(x);
  }
  function hide() {
    cursor.setAttribute("visibility", "hidden");
    if (first.length) tell(shown.breaks ? high : first[first.length - 1][0]);
  }
  hide();
  function point(event) {
    const box = svg.getBoundingClientRect(), share = (((event.clientX - box.left) / box.width) * whole - left) / width;
    const x = low + Math.min(1, Math.max(0, share)) * (high - low), tall = svg.viewBox.baseVal.height;
    const depth = (((event.clientY - box.top) / box.height) * tall - {{ top }}) / (tall - {{ top + bottom }});
    choose(Math.floor(depth * all.length));
    if (first.length) show(shown.breaks && curves.some(([name]) => isOdd(name, x)) ? Math.round(x) : near(first, x)[0]);
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const down = shown.is_map && { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const by = down ? 0 : { ArrowLeft: -1, ArrowRight: 1, Home: -first.length, End: first.length }[event.key];
    if (by === undefined || !first.length) return;
    event.preventDefault();
    choose(row + (down || 0));
    at = Math.min(first.length - 1, Math.max(0, at + by));
    show(first[at][0]);
  });
}

for (const picture of document.querySelectorAll("[data-ranks]")) {
  const { hosts, axes, ranks } = JSON.parse(picture.dataset.ranks), cells = [...picture.querySelectorAll(".group i")];
  const output = picture.parentElement.querySelector("output"), row = Math.round(cells.length / picture.children.length) || 1;
  let at = -1;
  function show(cell) {
    cells[at]?.classList.remove("on");
    at = cell;
    const [rank, host, work, memory, ...places] = ranks[at];
    const told = ["rank " + rank + (hosts[host] ? " on " + hosts[host] : ""), axes.map((axis, i) => axis + " " + places[i]).join(" ")];
    if (memory !== null) told.push(memory.toFixed(2) + " GiB");
    if (work !== null) told.push(work.toFixed(2) + " × the work of the best");
    cells[at].classList.add("on");
    output.textContent = told.join(", ");
  }
  const point = (event) => cells.includes(event.target) && show(cells.indexOf(event.target));
  picture.addEventListener("pointerover", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -cells.length, End: cells.length };
    if (!(event.key in keys) || !cells.length) return;
    event.preventDefault();
    show(Math.min(cells.length - 1, Math.max(0, at + keys[event.key])));
  });
}

// On paper everything is open.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
