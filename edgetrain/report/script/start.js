// Draws every timeline of the page from the JSON in it. Nothing is fetched.

const DATA = JSON.parse(document.getElementById("data").textContent);
const views = [], steps = new Map();
for (const root of document.querySelectorAll(".view")) {
  const run = DATA.runs[Number(root.dataset.run)], which = root.dataset.view;
  const view = new View(root, which === "step" ? stepModel(run.step) : runModel(run.run));
  views.push(view);
  if (which === "step") steps.set(root.dataset.run, view);
}
for (const root of document.querySelectorAll(".breakdown")) breakdown(root, steps.get(root.dataset.run));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = {};
  views.forEach((view) => view.draw());
});
