// The page of all comparisons, and that of one, which asks for what is new every two seconds.

import {Chart} from './chart.js'
import {ago, duration, element, metricInWords} from './format.js'
import {looksOf} from './looks.js'
import {Table} from './table.js'

const POLL = 2000
const byId = id => document.getElementById(id)
const identity = /^\/comparisons\/([0-9a-f]{16})$/.exec(location.pathname)?.[1]
const asked = new URLSearchParams(location.search)
const isDark = (localStorage.getItem('theme') ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : '')) === 'dark'
document.documentElement.classList.toggle('dark', isDark)

async function ask(path) {
    const answer = await fetch(path, {cache: 'no-store'})
    if (!answer.ok) {
        throw Object.assign(new Error(answer.statusText), {status: answer.status})
    }
    return answer.json()
}

function say(text, isTrouble = false) {
    byId('summary').textContent = text
    byId('summary').classList.toggle('lost', isTrouble)
}

function inWords({runs, finished, running, progress, left, changed}) {
    const parts = [`${runs} ${runs === 1 ? 'run' : 'runs'}`, `${finished} finished`]
    if (running) {
        parts.push(`${running} running`)
    }
    if (progress && finished < runs) {
        parts.push(`${Math.floor(100 * progress)} % trained`)
    }
    if (left !== null) {
        parts.push(`about ${duration(Math.ceil(left))} of training left`)
    }
    return parts.join(', ') + (changed ? `; last record ${ago(changed)}` : '; no record yet')
}

function repeat(poll) {
    const again = async () => {
        if (!document.hidden) {
            try {
                await poll()
            } catch (error) {
                say(error.status === 404 ? 'There is no such comparison here, or its folder is gone.'
                    : error.status ? `The dashboard answers with an error, ${error.status}; its log says why.`
                    : 'The dashboard does not answer. This page goes on when it is back.', true)
                if (!(error instanceof TypeError) && !error.status) {
                    throw error
                }
            }
        }
        setTimeout(again, POLL)
    }
    again()
}

async function showList() {
    const comparisons = await ask('/comparisons/list')
    say(comparisons.length ? '' : 'No comparison yet. Start one with: memformers compare --scale 0.1. '
        + 'A run of its own, as memformers train begins one, is under Runs.')
    byId('list').replaceChildren(...comparisons.map(one => element('a', {className: 'card', href: `/comparisons/${one.id}`},
        element('h2', {textContent: one.name}),
        element('p', {textContent: inWords(one)}),
        element('p', {textContent: one.arms.join(', ')}))))
}

function showOne() {
    const chart = new Chart(byId('chart'), byId('legend'), isZoomed => {
        byId('whole').hidden = !isZoomed
    })
    const table = new Table(byId('table'))
    let data = null
    let metric = asked.get('metric') ?? ''
    byId('over').value = asked.get('over') === 'seconds' ? 'seconds' : 'tokens'

    const show = () => {
        const looks = looksOf(data.arms.map(arm => arm.name), isDark)
        byId('comparison').hidden = false
        byId('title').textContent = data.name
        byId('report').hidden = !data.report
        byId('report').href = `/comparisons/${identity}/report`
        document.title = `${data.name} – comparison`
        const names = [...byId('metric').options].map(option => option.value)
        if (JSON.stringify(names) !== JSON.stringify(data.metrics)) {
            byId('metric').replaceChildren(...data.metrics.map(name => element('option', {value: name, textContent: metricInWords(name)})))
        }
        byId('metric').value = data.metric
        const hasSeeds = data.runs.length > data.arms.length
        byId('rows').hidden = !hasSeeds
        if (!hasSeeds) {
            table.rows = 'runs'
        }
        for (const button of byId('rows').children) {
            button.setAttribute('aria-pressed', String(button.dataset.rows === table.rows))
        }
        byId('note').textContent = (hasSeeds ? 'Thick lines are means over the seeds that are finished, with bands of '
            + '95 % intervals; thin lines are single seeds. ' : '') + 'Drag over the chart to enlarge a part; '
            + 'click a name to hide it.'
        chart.show(data, looks, byId('log').checked)
        table.show(data, looks)
    }
    const poll = async () => {
        const question = new URLSearchParams({metric, over: byId('over').value, seen: data?.version ?? ''})
        const answer = await ask(`/comparisons/${identity}/data?${question}`)
        if (answer.runs) {
            data = answer
            show()
        }
        say(inWords({...data, runs: data.runs.length}))
    }
    const choose = () => {
        metric = byId('metric').value
        history.replaceState(null, '', `?${new URLSearchParams({metric, over: byId('over').value})}`)
        poll()
    }
    byId('metric').addEventListener('change', choose)
    byId('over').addEventListener('change', choose)
    byId('log').addEventListener('change', show)
    byId('whole').addEventListener('click', () => chart.whole())
    for (const button of byId('rows').children) {
        button.addEventListener('click', () => {
            table.rows = button.dataset.rows
            show()
        })
    }
    repeat(poll)
}

if (identity) {
    showOne()
} else {
    repeat(showList)
}
