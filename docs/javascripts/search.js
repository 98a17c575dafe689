// The search reads a dash before a word as "without this word", and refuses two: "--resume" would find nothing.
// So it is given an option's name without dashes, while the user sees what was typed.
const ofInputs = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
const search = document.querySelector(".md-search__input");
if (search) {
  Object.defineProperty(search, "value", {
    get() {
      return ofInputs.get.call(this).replace(/(^|\s)--(?=\w)/g, "$1");
    },
    set(text) {
      ofInputs.set.call(this, text);
    },
  });
}
