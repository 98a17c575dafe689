// The colours and lines of the report's figures (memformers/report/plotting.py), and lighter ones on a dark page.

const [BLUE, ORANGE, GREEN, PINK, SKY, AMBER, BLACK] = [
    {color: '#0072B2', dark: '#3FA9E8', dash: [2, 4]},
    {color: '#D55E00', dark: '#F58A3C', dash: []},
    {color: '#009E73', dark: '#2CCB9E', dash: [10, 5]},
    {color: '#CC79A7', dark: '#E29BC6', dash: [10, 4, 2, 4]},
    {color: '#56B4E9', dark: '#8CD0F5', dash: [14, 4, 4, 4, 4, 4]},
    {color: '#E69F00', dark: '#F0BC45', dash: [6, 3]},
    {color: '#000000', dark: '#FFFFFF', dash: [3, 3]},
]
const NAMED = {
    'transformer': BLUE, 'no-memory': BLUE, 'transformer-xl': ORANGE, 'compressive': GREEN, 'conv': GREEN,
    'frozen': PINK, 'mean': SKY, 'ceiling': AMBER,
}
const OTHERS = [PINK, SKY, AMBER, BLACK]

export function looksOf(arms, isDark) {
    const isNamed = arm => Object.hasOwn(NAMED, arm)
    const taken = arms.filter(isNamed).map(arm => NAMED[arm])
    const left = OTHERS.filter(look => !taken.includes(look))
    const free = left.length ? left : OTHERS
    const looks = {}
    let others = 0
    for (const arm of arms) {
        const look = isNamed(arm) ? NAMED[arm] : free[others++ % free.length]
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
