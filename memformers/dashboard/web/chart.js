// The chart: for each arm the mean of its seeds with a band, and thin lines of the single seeds.

import {compact, duration, element, metricInWords, plain} from './format.js'
import {swatch} from './looks.js'

const GAP = 12
const TIMES = [.1, .2, .5, 1, 2, 5, 10, 20, 30, ...[1, 2, 5, 10, 20, 30].map(minutes => 60 * minutes),
    ...[1, 2, 3, 6, 12, 24, 48, 96, 240].map(hours => 3600 * hours)]

export class Chart {
    constructor(place, legend, onZoom) {
        this.place = place
        this.legend = legend
        this.onZoom = onZoom
        this.hidden = new Set()
        this.plot = null
        this.shape = ''
        this.isZoomed = false
        addEventListener('resize', () => this.plot?.setSize(this.size()))
    }

    size() {
        const width = Math.max(200, this.place.clientWidth)
        return {width, height: width < 600 ? 280 : 420}
    }

    show(data, looks, isLog) {
        this.data = data
        this.looks = looks
        const lines = this.lines()
        const shape = JSON.stringify([lines.map(line => [line.arm, line.label, line.kind]), data.metric, data.over,
            isLog, looks])
        if (shape !== this.shape) {
            this.shape = shape
            this.draw(lines, isLog)
        } else {
            this.plot.setData(this.table(lines), !this.isZoomed)
            if (this.isZoomed) {
                this.plot.redraw()
            }
        }
        this.labels()
    }

    whole() {
        this.isZoomed = false
        this.plot?.setData(this.plot.data, true)
        this.onZoom(false)
    }

    /* Thin lines come first, so that the means lie above them. */
    lines() {
        const shown = this.data.arms.filter(arm => !this.hidden.has(arm.name))
        const lines = []
        for (const arm of shown) {
            const runs = this.data.runs.filter(run => run.arm === arm.name && run.curve.x.length)
            const alone = arm.counted.length === 1 ? arm.counted[0] : null
            for (const run of runs.filter(run => run.name !== alone)) {
                lines.push({arm: arm.name, label: run.name, kind: 'seed', x: run.curve.x, y: run.curve.y})
            }
        }
        for (const arm of shown.filter(arm => arm.mean.x.length)) {
            const {x, y, low, high, seeds} = arm.mean
            if (seeds > 1) {
                lines.push({arm: arm.name, label: 'low', kind: 'edge', x, y: low})
                lines.push({arm: arm.name, label: 'high', kind: 'edge', x, y: high})
            }
            lines.push({arm: arm.name, label: arm.name, kind: 'mean', x, y})
        }
        return lines
    }

    table(lines) {
        return lines.length ? uPlot.join(lines.map(line => [line.x, line.y])) : [[], []]
    }

    draw(lines, isLog) {
        const style = getComputedStyle(document.documentElement)
        const colour = name => style.getPropertyValue(name).trim()
        const axis = {stroke: colour('--text'), grid: {stroke: colour('--line'), width: 1},
            ticks: {stroke: colour('--line'), width: 1}}
        const inTokens = this.data.over === 'tokens'
        const series = lines.map(line => this.series(line))
        const bands = lines.flatMap((line, i) => line.kind === 'edge' && line.label === 'high'
            ? [{series: [i + 1, i], fill: this.looks[line.arm].color + '30'}] : [])
        this.plot?.destroy()
        this.isZoomed = false
        this.onZoom(false)
        this.plot = new uPlot({
            ...this.size(),
            legend: {show: false},
            cursor: {points: {show: false}, drag: {x: true, y: false}},
            scales: {x: {time: false}, y: {distr: isLog ? 3 : 1}},
            axes: [
                {...axis, label: inTokens ? 'tokens' : 'training time', labelSize: 24, size: 40,
                    values: (_, ticks) => ticks.map(tick => inTokens ? compact(tick) : duration(tick)),
                    space: inTokens ? 60 : 100, ...inTokens ? {} : {incrs: TIMES}},
                {...axis, label: metricInWords(this.data.metric), labelSize: 24, size: 64, values: (_, ticks) => ticks.map(tick => tick === null ? '' : plain(tick))},
            ],
            series: [{}, ...series],
            bands,
            hooks: {
                setCursor: [plot => this.values(plot.cursor.idx)],
                setSelect: [plot => {
                    if (plot.select.width > 0) {
                        this.isZoomed = true
                        this.onZoom(true)
                    }
                }],
                ready: [plot => plot.over.addEventListener('dblclick', () => this.whole())],
            },
        }, this.table(lines), this.place)
        this.drawn = lines
        this.plot.root.setAttribute('role', 'img')
        this.plot.root.setAttribute('aria-label', `${metricInWords(this.data.metric)} over ${this.data.over}; the table has the numbers`)
    }

    series({arm, label, kind}) {
        const {color, dash} = this.looks[arm]
        if (kind === 'edge') {
            return {label, auto: false, stroke: 'transparent', width: 0, points: {show: false}}
        }
        const isMean = kind === 'mean'
        return {label, stroke: isMean ? color : color + '70', width: isMean ? 2.5 : 1, dash: isMean ? dash : [],
            points: isMean ? {size: 6, space: GAP, fill: color} : {show: false}}
    }

    labels() {
        this.legend.replaceChildren(...this.data.arms.map(arm => {
            const shown = !this.hidden.has(arm.name)
            const seeds = arm.mean.seeds > 1 ? ` (mean of ${arm.mean.seeds} seeds)` : ''
            const button = element('button', {type: 'button', title: shown ? 'Hide it' : 'Show it'},
                swatch(this.looks[arm.name]), element('span', {textContent: arm.name + seeds}), element('output'))
            button.setAttribute('aria-pressed', String(shown))
            button.dataset.arm = arm.name
            button.addEventListener('click', () => {
                this.hidden[shown ? 'add' : 'delete'](arm.name)
                this.show(this.data, this.looks, this.plot.scales.y.distr === 3)
            })
            return button
        }))
        this.values(this.plot.cursor.idx)
    }

    /* What each arm has at the cursor, or last. */
    values(index) {
        for (const button of this.legend.children) {
            const at = this.drawn.findIndex(line => line.kind === 'mean' && line.arm === button.dataset.arm)
            const column = at < 0 ? [] : this.plot.data[at + 1]
            let i = index ?? column.length - 1
            while (i > 0 && (column[i] === undefined || column[i] === null)) {
                i--
            }
            const value = column[i]
            button.lastChild.textContent = value === undefined || value === null ? '' : plain(value)
        }
    }
}
