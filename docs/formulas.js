// Formulas of each page, also of those that are loaded without a reload.
document$.subscribe(({ body }) =>
  renderMathInElement(body, {
    delimiters: [
      { left: "$$", right: "$$", display: true },
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
  }),
)
