// Numbers and states in words.

const STATES = {
    waiting: 'waiting', running: 'running', finished: 'finished', stopped: 'stopped', failed: 'failed',
    silent: 'no news',
}

export function stateInWords(state) {
    return STATES[state] ?? state
}

export function compact(number) {
    const [size, unit] = [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']].find(([size]) => Math.abs(number) >= size) ?? [1, '']
    return `${+(number / size).toPrecision(3)}${unit}`
}

export function duration(seconds) {
    const [h, m, s] = [seconds / 3600, (seconds % 3600) / 60, seconds % 60].map(Math.floor)
    const parts = h ? [[h, 'h'], [m, 'min']] : m ? [[m, 'min'], [s, 's']] : [[+seconds.toPrecision(2), 's']]
    return parts.filter(([number], i) => number || !i).map(part => part.join(' ')).join(' ')
}

export function bytes(number) {
    return number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(2)} GiB` : `${Math.round(number / 2 ** 20)} MiB`
}

export function ago(time) {
    const seconds = Math.max(0, Date.now() / 1000 - time)
    return seconds < 3 ? 'just now' : `${duration(Math.round(seconds))} ago`
}

export function plain(number) {
    return Math.abs(number) >= 1e4 || (number && Math.abs(number) < 1e-3)
        ? number.toExponential(3) : String(+number.toPrecision(5))
}

export function setting(value) {
    return value === null || value === undefined ? '–' : typeof value === 'string' ? value : JSON.stringify(value)
}

export function element(kind, properties = {}, ...children) {
    const made = Object.assign(document.createElement(kind), properties)
    made.append(...children)
    return made
}
