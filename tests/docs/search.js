// The search of the site in node: its own worker and index, asked what is typed into its field.
// node search.js WORKER INDEX TYPING QUERY …: prints the pages that each query finds, best first, as JSON.
const fs = require("fs"), [worker, index, typing, ...queries] = process.argv.slice(2);
let listen, answer;
Object.assign(globalThis, {
  self: globalThis, addEventListener: (_, f) => { listen = f; }, postMessage: (m) => answer(m),
  HTMLInputElement: class { get value() { return this.typed; } set value(text) { this.typed = text; } },
});
const input = new HTMLInputElement();
globalThis.document = { querySelector: () => input };
eval(fs.readFileSync(worker, "utf8"));
eval(fs.readFileSync(typing, "utf8"));
const send = (message) => new Promise((done) => { answer = done; listen({ data: message }); });
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await send({ type: 0, data: { config, docs, options: {} } });
  const found = {};
  for (const query of queries) {
    input.value = query;
    const { data } = await send({ type: 2, data: input.value });
    found[query] = data.items.map((sections) => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
