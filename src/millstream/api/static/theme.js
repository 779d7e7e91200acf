// Runs before the first paint, so that a page chosen dark never flashes white. Not a module: those wait.
(() => {
  const root = document.documentElement;
  const chosen = localStorage.getItem("millstream.theme");
  if (chosen) root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const dark = root.dataset.theme
        ? root.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("millstream.theme", root.dataset.theme);
      dispatchEvent(new Event("themechange")); // for what is drawn, and not styled
    });
  });
})();
