// A chart tells its values at the pointer, at a touch, and by the arrow keys; so does the picture of the ranks.
// Curves over steps are drawn anew when an axis or the smoothing is chosen.
function number(value, digits = 5) {
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function said(shown, row) {
  const unit = (value, digits) => (shown.percent ? (100 * value).toFixed(1) + "%" : number(value, digits) + (shown.suffix || ""));
  const seconds = (value) => (value < 1 ? number(1000 * value, 3) + " ms" : number(value, 3) + " s");
  if (shown.names) return shown.names.map((name, at) => name + " " + seconds(row[at + 1])).join(", ");
  const [, least, mean, largest] = row;
  return mean === undefined ? unit(least) : unit(mean) + " (" + unit(least, 4) + " to " + unit(largest, 4) + ")";
}

// Numbers of an axis: in the unit of the largest, or each in its own.
const UNITS = [[1e12, 1e12, " T"], [1e9, 1e9, " G"], [1e6, 1e6, " M"], [1e5, 1e3, " k"], [0, 1, ""]];
const TIMES = [[86400, 86400, " d"], [3600, 3600, " h"], [60, 60, " min"], [0, 1, " s"]];
function texts(values, kind, own) {
  const most = Math.max(...values.map(Math.abs));
  return values.map((value) => {
    if (kind === "percent") return number(100 * value, 4) + "%";
    const [, unit, suffix] = (kind === "time" ? TIMES : UNITS).find(([least]) => (own ? Math.abs(value) : most) >= least);
    if (value && most < 1 && kind !== "time") return String(+value.toPrecision(6));
    return value || kind === "time" ? number(value / unit, kind === "time" ? 3 : 6) + suffix : "0";
  });
}

const SPANS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
// About five round numbers: between the ends, or so that they reach around them.
function ticks(low, high, kind, isLog, isAround) {
  if (isLog && high / low > 5) {
    const factors = high / low > 1e3 ? [1] : [1, 2, 5], powers = Array.from({ length: 40 }, (_, at) => at - 20);
    const found = (kind === "time" ? SPANS : powers.flatMap((power) => factors.map((factor) => +(factor * 10 ** power).toPrecision(3)))).filter((tick) => tick >= low && tick <= high);
    return found.filter((_, at) => at % Math.ceil(found.length / 7) === 0);
  }
  const raw = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const steps = kind === "time" && raw > 1 && raw <= 864000 ? SPANS : [1, 2, 2.5, 5, 10].map((factor) => factor * power);
  const step = Math.max(kind === "step" ? 1 : 0, steps.find((step) => step >= raw * 0.999)), found = [];
  const first = isAround ? Math.floor(low / step + 1e-9) : Math.ceil(low / step - 1e-9), last = isAround ? Math.ceil(high / step - 1e-9) : Math.floor(high / step + 1e-9);
  for (let at = first; at <= last; at++) found.push(+(at * step).toPrecision(12));
  return found;
}

const page = JSON.parse(document.querySelector("main").dataset.places), form = document.querySelector(".controls");
const choice = { x: "step", smoothing: 0, logX: false, logY: false };
const runOf = (name) => (name.split(":")[0] in page.places ? name.split(":")[0] : Object.keys(page.places)[0]);

// The place of a step of a run on the chosen axis; null where it is unknown.
function placeOf(run, step) {
  const column = { step: 0, tokens: 1, time: 2 }[choice.x], rows = page.places[run].filter((row) => row[column] !== null);
  if (!column || !rows.length) return column ? null : step;
  const after = rows.findIndex((row) => row[0] >= step), [a, b] = after > 0 ? [rows[after - 1], rows[after]] : after ? rows.slice(-2) : rows;
  return !b || b[0] === a[0] ? a[column] : a[column] + ((step - a[0]) / (b[0] - a[0])) * (b[column] - a[column]);
}

// An exponential mean in which a row weighs S times less at each hundredth of the axis.
function smoothed(rows, width) {
  let total = 0, weight = 0, before = Infinity;
  return rows.map(([x, least, mean = least, largest = least]) => {
    const kept = choice.smoothing ** Math.min(1e3, Math.max(0, x - before) / width);
    [total, weight, before] = [kept * total + (1 - choice.smoothing) * mean, kept * weight + 1 - choice.smoothing, x];
    return largest > least ? [x, least, total / weight, largest] : [x, total / weight];
  });
}

// The values to show, as chart.py chooses them: all, unless a tenth of the rows would hide the rest.
function range(rows, isCut) {
  const lows = rows.map((row) => row[1]).sort((a, b) => a - b), highs = rows.map((row) => row[3] ?? row[1]).sort((a, b) => a - b);
  const tenth = Math.floor(rows.length / 10), low = lows[tenth], high = highs[rows.length - 1 - tenth], margin = high - low;
  const [least, largest] = [lows[0], highs[rows.length - 1]];
  if (!isCut || rows.length < 40 || margin <= 0) return [least, largest];
  return [low - least <= margin ? least : low - 0.1 * margin, largest - high <= margin ? largest : high + 0.1 * margin];
}

const lookOf = (shown, name, all) => {
  const at = Object.keys(all).indexOf(name), dashes = Math.floor(at / 8) % 3;
  return shown.looks?.[name] ?? "c" + (at % 8) + (dashes ? " d" + dashes : "");
};
const escaped = (text) => text.replace(/[&<>"]/g, (mark) => "&#" + mark.charCodeAt() + ";");

function redrawn(shown, figure, svg) {
  const isLogY = choice.logY && !shown.by, isOn = (row) => row[0] !== null && !(choice.logX && row[0] <= 0);
  const onAxis = (name, rows) => (shown.by ? rows : rows.map(([step, ...rest]) => [placeOf(runOf(name), step), ...rest])).filter(isOn);
  const all = shown.by ? shown.by[choice.x] : shown.curves, isShown = (row) => isOn(row) && !(isLogY && row[1] <= 0);
  const curves = Object.entries(all).map(([name, rows]) => [name, onAxis(name, rows).filter(isShown)]);
  const dots = Object.entries(shown.dots || {}).map(([name, rows]) => [name, onAxis(name, rows).filter(isShown)]);
  const breaks = Object.entries(shown.breaks || {}).map(([name, ends]) => [name, onAxis(name, ends.map((end) => [end]))]);
  const rows = [...curves, ...dots].flatMap(([, rows]) => rows), xs = [...rows, ...breaks.flatMap(([, ends]) => ends)].map((row) => row[0]);
  const box = svg.viewBox.baseVal, left = {{ left }}, top = {{ top }}, width = box.width - left - {{ right }}, height = box.height - top - {{ bottom }};
  const low = Math.min(...xs), high = Math.max(...xs), log = (isLog) => (isLog ? Math.log10 : (value) => value);
  const share = (value, low, high, isLog) => (high > low ? (log(isLog)(value) - log(isLog)(low)) / (log(isLog)(high) - log(isLog)(low)) : 0.5);
  const toX = (x) => share(x, low, high, choice.logX);
  if (!rows.length) return { curves: [], low: 0, high: 1, toX, html: "", breaks: {} };
  let [least, largest] = range(rows, !shown.whole && !isLogY);
  const whole = [Math.min(...rows.map((row) => row[1])), Math.max(...rows.map((row) => row[3] ?? row[1]))];
  if (largest <= least) [least, largest] = isLogY ? [least / 2, least * 2] : [least - (Math.abs(least) / 2 || 0.5), least + (Math.abs(least) / 2 || 0.5)];
  const kind = shown.percent && "percent", marksY = ticks(least, largest, kind, isLogY, !isLogY);
  if (!isLogY) [least, largest] = [Math.min(least, marksY[0]), Math.max(largest, marksY[marksY.length - 1])];
  const px = (x) => (left + toX(x) * width).toFixed(1);
  const py = (y) => (top + height - Math.max(-1, Math.min(2, share(y, least, largest, isLogY))) * height).toFixed(1);
  const path = (points) => points.map(([x, y]) => px(x) + "," + py(y)).join(" ");
  let html = "";
  texts(marksY, kind, isLogY).forEach((text, at) => {
    html += `<line class="grid" x1="${left}" x2="${left + width}" y1="${py(marksY[at])}" y2="${py(marksY[at])}"/><text x="${left - 6}" y="${+py(marksY[at]) + 4}" text-anchor="end">${text}</text>`;
  });
  html += `<text class="axis" x="2" y="${box.height - 8}">${choice.x}</text>`;
  const marksX = ticks(low, high, choice.x, choice.logX);
  texts(marksX, choice.x, choice.logX).forEach((text, at) => {
    const x = +px(marksX[at]), anchor = x > box.width - {{ 3 * right }} ? "end" : "middle";
    // Here it would touch the name of the axis.
    if (x < left + 12) return;
    html += `<text x="${x}" y="${box.height - 8}" text-anchor="${anchor}">${text}</text>`;
  });
  for (const [run, step, text] of shown.by ? [] : page.marks) {
    const x = placeOf(runOf(run), step), line = `x1="${px(x)}" x2="${px(x)}" y1="${top}" y2="${top + height}"`;
    if (x !== null && x >= low && x <= high) html += `<g class="mark"><title>${escaped(text)}</title><line ${line}/><line class="near" ${line}/></g>`;
  }
  html += `<svg x="${left}" y="${top}" width="${width}" height="${height}" viewBox="${left} ${top} ${width} ${height}">`;
  for (const [, ends] of breaks)
    if (ends.length) html += `<rect class="break" x="${px(ends[0][0])}" y="${top}" width="${Math.max(2, px(ends[1][0]) - px(ends[0][0]))}" height="${height}"/>`;
  if (shown.by && least < 0 && largest > 0) html += `<line class="zero" x1="${left}" x2="${left + width}" y1="${py(0)}" y2="${py(0)}"/>`;
  const drawn = curves.map(([name, rows]) => [name, choice.smoothing ? smoothed(rows, (high - low) / 100 || 1) : rows]);
  drawn.forEach(([name, rows], at) => {
    const look = lookOf(shown, name, all), mean = (row) => row[2] ?? row[1];
    if (rows.length === 1) html += `<circle class="dots ${look}" cx="${px(rows[0][0])}" cy="${py(mean(rows[0]))}" r="3"/>`;
    if (rows.length < 2) return;
    if (rows.some((row) => row[3] > row[1])) html += `<polygon class="band ${look}" points="${path([...rows.map((row) => [row[0], row[3] ?? row[1]]), ...rows.map((row) => [row[0], row[1]]).reverse()])}"/>`;
    if (choice.smoothing && curves.length < 5) html += `<polyline class="curve raw ${look}" points="${path(curves[at][1].map((row) => [row[0], mean(row)]))}"/>`;
    html += `<polyline class="curve ${look}" points="${path(rows.map((row) => [row[0], mean(row)]))}"/>`;
  });
  html += "</svg>";
  for (const [name, rows] of dots)
    for (const [x, y] of rows) if (y >= least && y <= largest) html += `<circle class="dots ${lookOf(shown, name, all)}" cx="${px(x)}" cy="${py(y)}" r="3"/>`;
  const outside = whole.filter((value) => value < least || value > largest);
  const note = outside.length ? "axis cut: values reach to " + texts(outside.map((value) => +value.toPrecision(4)), kind, true).join(" and ") : "";
  return { curves: drawn.filter(([, rows]) => rows.length), low, high, toX, html, note, breaks: Object.fromEntries(breaks.filter(([, ends]) => ends.length).map(([name, ends]) => [name, ends.map((end) => end[0])])) };
}

const charts = [];
for (const figure of document.querySelectorAll("[data-chart]")) {
  const shown = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  const whole = svg.viewBox.baseVal.width, left = {{ left }}, width = whole - left - {{ right }};
  const all = Object.entries(shown.names ? { "": shown.rows } : shown.curves).filter(([, rows]) => rows.length);
  const isOverSteps = "percent" in shown || "by" in shown;
  let curves = all, row = 0, axis = shown.axis || "step", [low, high] = shown.ends, breaks = shown.breaks;
  let toX = (x) => (high > low ? (x - low) / (high - low) : 0.5), first = [], at = 0;
  function choose(number) {
    // The cells of a map stand in rows, of which one is told.
    row = Math.min(all.length - 1, Math.max(0, number));
    if (shown.is_map) curves = [all[row]];
    first = curves.length ? curves[0][1] : [];
    at = Math.min(at, Math.max(0, first.length - 1));
  }
  const isOdd = (name, x) => breaks?.[name]?.[0] <= x && x <= breaks[name][1];
  const near = (rows, x) => rows.reduce((a, b) => (Math.abs(toX(b[0]) - toX(x)) < Math.abs(toX(a[0]) - toX(x)) ? b : a));
  function tell(x) {
    const values = curves.map(([name, rows]) => {
      const row = near(rows, x), isThere = Math.abs(toX(row[0]) - toX(x)) <= (choice.logX ? 0.1 : 2 / rows.length);
      return (all.length > 1 || shown.by ? name + " " : "") + (isThere ? said(shown, row) : isOdd(name, x) ? "not finite" : "–");
    });
    const place = axis === "time" || axis === "tokens" ? texts([+x.toPrecision(4)], axis)[0] : Math.round(x).toLocaleString("en");
    output.textContent = axis + " " + place + ": " + values.join(", ");
  }
  function show(x) {
    const place = left + toX(x) * width;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, place);
    cursor.setAttribute("visibility", "visible");
    tell(x);
  }
  function hide() {
    cursor.setAttribute("visibility", "hidden");
    output.textContent = "";
    if (first.length) tell(breaks ? high : first[first.length - 1][0]);
  }
  choose(0);
  at = first.length - 1;
  hide();
  function point(event) {
    const box = svg.getBoundingClientRect(), share = (((event.clientX - box.left) / box.width) * whole - left) / width;
    const part = Math.min(1, Math.max(0, share)), tall = svg.viewBox.baseVal.height;
    const x = choice.logX && isOverSteps ? low * (high / low) ** part : low + part * (high - low);
    const depth = (((event.clientY - box.top) / box.height) * tall - {{ top }}) / (tall - {{ top + bottom }});
    choose(Math.floor(depth * all.length));
    if (first.length) show(breaks && curves.some(([name]) => isOdd(name, x)) ? (axis === "step" ? Math.round(x) : x) : near(first, x)[0]);
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
  if (isOverSteps)
    charts.push(() => {
      const drawn = redrawn(shown, figure, svg), cut = [...figure.querySelectorAll("small")].find((note) => note.textContent.startsWith("axis cut"));
      ({ curves, low, high, toX, breaks } = drawn);
      axis = choice.x;
      if (!Object.keys(breaks).length) breaks = undefined;
      for (const old of [...svg.children]) if (old !== cursor) old.remove();
      cursor.insertAdjacentHTML("beforebegin", drawn.html || `<text x="${left}" y="60">not recorded by ${choice.x}</text>`);
      cut?.remove();
      if (drawn.note) figure.querySelector("figcaption").insertAdjacentHTML("beforeend", "<small>" + drawn.note + "</small>");
      choose(0);
      at = first.length - 1;
      hide();
    });
}
if (form) {
  for (const axis of ["tokens", "time"])
    if (!Object.values(page.places).some((rows) => rows.some((row) => row[axis === "time" ? 2 : 1] !== null))) form.x.querySelector(`[value=${axis}]`).disabled = true;
  form.addEventListener("input", () => {
    Object.assign(choice, { x: form.x.value, smoothing: +form.smoothing.value, logX: form.logX.checked, logY: form.logY.checked });
    form.querySelector("b").textContent = choice.smoothing || "none";
    for (const draw of charts) draw();
  });
  form.hidden = false;
  // A browser keeps what was chosen when a page is loaded again.
  if (form.x.value !== "step" || +form.smoothing.value || form.logX.checked || form.logY.checked) form.dispatchEvent(new Event("input"));
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
