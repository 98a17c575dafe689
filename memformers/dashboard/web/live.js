// The page of a run or a comparison: every two seconds it asks for what is new, which the server has drawn and written.

const byId = id => document.getElementById(id)
const dark = matchMedia('(prefers-color-scheme: dark)')
const asked = new URLSearchParams(location.search)
let chosen = asked.get('metric') ?? ''
let seen = ''
byId('over').value = asked.get('over') === 'seconds' ? 'seconds' : 'tokens'

function say(text, isTrouble = false) {
    byId('summary').textContent = text
    byId('summary').className = isTrouble ? 'trouble' : ''
}

/* New HTML in a place, in which what the reader had opened stays open. */
function put(id, html) {
    const open = [...byId(id).querySelectorAll('details[open] > summary')].map(one => one.textContent)
    byId(id).innerHTML = html
    for (const one of byId(id).querySelectorAll('summary')) {
        one.parentElement.open = open.includes(one.textContent)
    }
}

function show(data) {
    document.title = byId('title').textContent = data.title
    byId('report').hidden = !data.report
    byId('report').querySelector('a').href = `${location.pathname}/report`
    put('above', data.above)
    put('below', data.below)
    byId('chosen').hidden = !data.metric
    byId('metric').replaceChildren(...Object.entries(data.metrics).map(([name, words]) => new Option(words, name)))
    byId('metric').value = data.metric
    if (data.metric) {
        const isNarrow = innerWidth < 600  // then plotly's buttons would lie over the curves
        const layout = {...data.figure.layout, height: isNarrow ? 420 : 460}
        layout.margin = {...layout.margin, r: isNarrow ? 15 : 45}
        const config = {responsive: true, displaylogo: false, displayModeBar: isNarrow ? false : 'hover'}
        Plotly.react('chart', data.figure.data, layout, config)
    }
}

async function poll() {
    const question = new URLSearchParams({
        metric: chosen, over: byId('over').value, log: +byId('log').checked, dark: +dark.matches, seen,
    })
    const answer = await fetch(`${location.pathname}/data?${question}`, {cache: 'no-store'})
    if (answer.status === 404) {
        return say('There is no such run here, or its folder is gone.', true)
    }
    if (!answer.ok) {
        return say(`The dashboard answers with an error, ${answer.status}; its log says why.`, true)
    }
    const data = await answer.json()
    if (data.version !== seen) {
        show(data)
        seen = data.version
    }
    say(data.summary)
}

async function again() {
    if (!document.hidden) {
        try {
            await poll()
        } catch (error) {
            say('The dashboard does not respond. This page resumes when it is back.', true)
            if (!(error instanceof TypeError)) {
                throw error
            }
        }
    }
}

function choose() {
    history.replaceState(null, '', `?${new URLSearchParams({metric: chosen, over: byId('over').value})}`)
    again()
}

byId('metric').addEventListener('change', () => {
    chosen = byId('metric').value
    choose()
})
for (const id of ['over', 'log']) {
    byId(id).addEventListener('change', choose)
}
dark.addEventListener('change', again)
setInterval(again, 2000)
again()
