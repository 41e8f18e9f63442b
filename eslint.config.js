import js from "@eslint/js";
import globals from "globals";

const unused = { argsIgnorePattern: "^_" };

export default [
  { ignores: ["**/build/", ".venv*/"] },
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "no-unused-vars": ["error", unused],
      "no-var": "error",
      "prefer-const": "error",
      "object-shorthand": "error",
      "prefer-arrow-callback": "error",
      "no-throw-literal": "error",
      "no-implicit-coercion": "error",
      "no-restricted-properties": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property, message: "text from a run is not trusted: see dom.js" }))],
      eqeqeq: "error",
    },
  },
  { files: ["trainermon/**/*.js"], languageOptions: { globals: globals.browser } },
  { files: ["tests/**", "*.js"], languageOptions: { globals: { ...globals.browser, ...globals.node } } },
];
