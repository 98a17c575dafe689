// labml's page empties its body at each step, so the link stands beside the body.
document.addEventListener('DOMContentLoaded', () => {
    const link = document.createElement('a')
    link.className = 'memformers-comparisons'
    link.textContent = 'All runs in one chart'
    const lead = () => {
        const run = /^\/run\/(\w+)/.exec(location.pathname)
        link.href = '/comparisons' + (run ? `?run=${run[1]}` : '')
    }
    for (const event of ['pointerenter', 'focus', 'pointerdown', 'click']) {
        link.addEventListener(event, lead)
    }
    lead()
    document.documentElement.append(link)
})
