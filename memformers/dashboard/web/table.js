// The sortable table of results: a row for each arm or each run; of the settings, those that differ.

import {bytes, compact, duration, element, plain, setting, stateInWords} from './format.js'
import {swatch} from './looks.js'

const COLUMNS = [
    ['held_out', 'Held-out loss', plain, 'Nats a token over all held-out text, at the end'],
    ['bits_per_character', 'Bits/char', plain, 'Over all held-out text, at the end'],
    ['valid', 'Validation', plain, 'The last validation loss, over the part that every evaluation reads'],
    ['best', 'Best', plain, 'The lowest validation loss so far'],
    ['train', 'Training', plain, 'The last training loss'],
    ['tokens', 'Tokens', compact, 'Trained so far'],
    ['seconds', 'Time', duration, 'Training time, without evaluations'],
    ['tokens_per_second', 'Tokens/s', compact, 'The median of the records'],
    ['keys', 'Keys', plain, 'The most that a query attends to'],
    ['parameters', 'Parameters', compact, ''],
    ['peak_memory', 'Peak memory', bytes, ''],
]
const LOSSES = ['held_out', 'bits_per_character', 'valid', 'best']

export class Table {
    constructor(place) {
        this.place = place
        this.sorted = null
        this.rows = 'arms'
    }

    show(data, looks) {
        this.data = data
        this.looks = looks
        const rows = this.rows === 'arms' ? data.arms.map(arm => this.ofArm(arm)) : data.runs.map(run => this.ofRun(run))
        const columns = this.columns(rows)
        if (!columns.some(column => column.key === this.sorted?.key)) {
            this.sorted = null
        }
        if (this.sorted) {
            const {key, up} = this.sorted
            rows.sort((a, b) => compare(a.cells[key], b.cells[key], up))
        }
        this.place.replaceChildren(
            element('thead', {}, element('tr', {}, ...columns.map(column => this.head(column)))),
            element('tbody', {}, ...rows.map(row => element('tr', {}, ...columns.map(column => row.draw(column))))))
    }

    columns(rows) {
        const first = [{key: 'name', title: this.rows === 'arms' ? 'Arm' : 'Run'},
            {key: 'state', title: 'State', kind: 'words'}]
        const numbers = COLUMNS.filter(([key]) => rows.some(row => row.cells[key] !== undefined))
            .map(([key, title, format, hint]) => ({key, title, format, hint}))
        const settings = Object.entries(this.data.settings)
            .map(([name, short]) => ({key: `setting ${name}`, title: short, hint: name, kind: 'setting'}))
        const loss = numbers.filter(({key}) => LOSSES.includes(key))
        return [...first, ...loss, ...settings, ...numbers.filter(column => !loss.includes(column))]
    }

    head({key, title, hint = '', kind = ''}) {
        const {sorted} = this
        const mark = sorted?.key === key ? (sorted.up ? ' ▲' : ' ▼') : ''
        const button = element('button', {type: 'button', textContent: title + mark, title: hint})
        button.addEventListener('click', () => {
            this.sorted = {key, up: sorted?.key === key ? !sorted.up : true}
            this.show(this.data, this.looks)
            this.place.querySelector(`th[data-key="${CSS.escape(key)}"] button`).focus()
        })
        const head = element('th', {className: kind, scope: 'col'}, button)
        head.dataset.key = key
        head.setAttribute('aria-sort', mark ? (sorted.up ? 'ascending' : 'descending') : 'none')
        return head
    }

    ofRun(run) {
        const words = run.state === 'running' && run.progress !== null
            ? `running, ${Math.floor(100 * run.progress)} %` : stateInWords(run.state)
        const name = run.page ? element('a', {href: `/run/${encodeURIComponent(run.page)}`, textContent: run.name})
            : element('span', {textContent: run.name})
        return row(this.looks[run.arm], name, run.name, [[run.state, words, run.why]], run.values, run.settings,
            (key, format) => format(run.values[key]))
    }

    ofArm(arm) {
        const counts = [...new Set(arm.states)].map(state => {
            const count = arm.states.filter(other => other === state).length
            return [state, arm.states.length > 1 ? `${count} ${stateInWords(state)}` : stateInWords(state), '']
        })
        const means = Object.fromEntries(Object.entries(arm.values).map(([key, [mean]]) => [key, mean]))
        return row(this.looks[arm.name], element('span', {textContent: arm.name}), arm.name, counts, means,
            arm.settings, (key, format) => {
                const [mean, half] = arm.values[key]
                return !half ? format(mean) : `${format(mean)} ± ${format(+half.toPrecision(2))}`
            })
    }
}

function row(look, name, text, states, values, settings, write) {
    const cells = {name: text, state: states.map(([state]) => state).join(), ...values}
    for (const [key, value] of Object.entries(settings)) {
        cells[`setting ${key}`] = value
    }
    const draw = ({key, format, kind = ''}) => {
        if (key === 'name') {
            return element('td', {className: 'name'}, swatch(look), name)
        }
        if (key === 'state') {
            const parts = states.flatMap(([state, words, why], i) =>
                [i ? ', ' : '', element('span', {className: state, textContent: words, title: why})])
            return element('td', {className: 'words'}, ...parts)
        }
        const value = cells[key]
        const written = kind === 'setting' ? setting(value) : value === undefined ? '–' : write(key, format)
        return element('td', {className: kind, textContent: written})
    }
    return {cells, draw}
}

/* What is missing stands last, however the others are sorted. */
function compare(a, b, up) {
    const missing = [a, b].map(value => value === undefined || value === null)
    if (missing[0] || missing[1]) {
        return missing[0] - missing[1]
    }
    const less = typeof a === 'number' && typeof b === 'number' ? a - b
        : setting(a).localeCompare(setting(b), undefined, {numeric: true})
    return up ? less : -less
}
