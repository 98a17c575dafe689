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

const METRICS = {
    'loss.valid': 'validation loss (nats per token)', 'loss.train': 'training loss (nats per token)',
    'bits_per_character.valid': 'validation loss (bits per character)',
    'bits_per_character.train': 'training loss (bits per character)',
    'accuracy.valid': 'validation accuracy (share of tokens)', 'accuracy.train': 'training accuracy (share of tokens)',
    'reconstruction_loss.valid': 'reconstruction loss, validation (MSE)',
    'reconstruction_loss.train': 'reconstruction loss, training (MSE)',
    'gradient_norm': 'norm of the gradient', 'gradient_norm.compression': 'norm of the gradient of the compressions',
    'tokens_per_second': 'training speed (tokens per second)', 'memory.length': 'memory (positions)',
    'memory.compressed_length': 'compressed memory (slots)', 'learning_rate': 'learning rate',
    'return.train': 'rewards of an episode', 'length.train': 'steps of an episode',
    'success.train': 'episodes that succeed (share)', 'success.valid': 'episodes that succeed, likeliest actions (share)',
    'acting_per_second': 'speed of acting (steps per second)',
    'learning_per_second': 'speed of learning (steps per second)',
    'evaluated_tokens': 'tokens read by an evaluation', 'evaluation_seconds': 'time of evaluations (seconds)',
}

/* The title of a metric, with its unit; a metric of another program has its own name. */
export function metricInWords(name) {
    const far = /^recall\.from_(\d+)$/.exec(name)
    return far ? `right answers, set ${+far[1]} or more positions ago (share)` : METRICS[name] ?? name
}

export function element(kind, properties = {}, ...children) {
    const made = Object.assign(document.createElement(kind), properties)
    made.append(...children)
    return made
}
