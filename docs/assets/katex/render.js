// Sets the formulas of a page: <span class="arithmatex">\(...\)</span> within text, <div class="arithmatex">\[...\]</div> by themselves.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim();
  katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: false });
}
