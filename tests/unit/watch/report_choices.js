const form = page.querySelector(".controls");
const figures = [...page.querySelectorAll("[data-chart]")].filter((one) => one.dataset.chart.includes('"by"'));
const [loss, minus] = [page.querySelector("[data-chart]"), figures[0]];
const text = (figure) => figure.querySelector("output").textContent;
const first = (figure) => {
  press(figure.querySelector("svg"), "Home");
  return text(figure);
};
const shown = (figure) => [...figure.querySelectorAll("svg text")].map((one) => one.textContent);
told.push(form.hidden, text(loss), text(minus));
for (const [x, smoothing, log] of [["tokens", 0, 0], ["time", 0, 0], ["tokens", 0.5, 1], ["step", 0, 0]]) {
  form.x.value = x;
  form.smoothing.value = smoothing;
  form.logX.checked = form.logY.checked = log;
  form.dispatchEvent(new Event("input", {bubbles: true}));
  const lines = [...loss.querySelectorAll(".curve:not(.raw)")].map((one) => one.getAttribute("points"));
  const points = (line) => line.split(" ").map((point) => point.split(",").map(Number));
  told.push([first(loss), first(minus), shown(loss), lines.map(points)]);
}
told.push(...[".dots", ".mark", ".cursor"].map((style) => loss.querySelectorAll(style).length));
