// Sets the formulas of a page: <span class="arithmatex">\(...\)</span> within text, <div class="arithmatex">\[...\]</div> by themselves.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim();
  katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: false });
}

// A line may end within a formula, but not between a formula and the comma after it.
for (const last of document.querySelectorAll("span.arithmatex .katex-html > :last-child")) {
  const together = document.createElement("span");
  together.style.whiteSpace = "nowrap";
  last.replaceWith(together);
  together.append(last);
}
