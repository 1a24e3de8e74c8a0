const seen = (one) => at.getComputedStyle(one);
const end = page.querySelector(".commands").getBoundingClientRect().bottom;
const tiles = page.querySelectorAll(".answers .tile"), shown = [...tiles].every((tile) => tile.clientHeight > 0);
const dot = page.querySelector(".point[tabindex]"), cell = page.querySelector(".layouts td:last-child");
dot.focus();
const focused = seen(dot.querySelector(".told")).visibility;
const dark = seen(page.body).backgroundColor;
told.push([width, fits, loaded, shown && end < height, focused, seen(cell).display, dark]);
