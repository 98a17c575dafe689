// Okabe and Ito's colours (2008), with a line of its own for each arm, as the report has them.

const NAMED = {
    'transformer': {color: '#0072B2', dark: '#3FA9E8', dash: [2, 4]},
    'transformer-xl': {color: '#D55E00', dark: '#F58A3C', dash: []},
    'compressive': {color: '#009E73', dark: '#2CCB9E', dash: [10, 5]},
}
const OTHERS = [
    {color: '#B5568C', dark: '#E29BC6', dash: [10, 4, 2, 4]},
    {color: '#2A86BB', dark: '#8CD0F5', dash: [14, 4]},
    {color: '#A87400', dark: '#F0BC45', dash: [6, 3]},
    {color: '#000000', dark: '#FFFFFF', dash: [3, 3]},
]

export function looksOf(arms, isDark) {
    const looks = {}
    let others = 0
    for (const arm of arms) {
        const look = Object.hasOwn(NAMED, arm) ? NAMED[arm] : OTHERS[others++ % OTHERS.length]
        looks[arm] = {color: isDark ? look.dark : look.color, dash: look.dash}
    }
    return looks
}

export function swatch(look) {
    const canvas = document.createElement('canvas')
    canvas.className = 'swatch'
    canvas.width = 60
    canvas.height = 24
    const context = canvas.getContext('2d')
    context.strokeStyle = look.color
    context.lineWidth = 5
    context.setLineDash(look.dash.map(length => 2 * length))
    context.moveTo(0, 12)
    context.lineTo(60, 12)
    context.stroke()
    return canvas
}
