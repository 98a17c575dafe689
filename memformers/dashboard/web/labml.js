// On labml's page: the link to ours, and a line where the browser can't reach the three files that labml's page
// loads from public servers. labml empties the body of its page, so both stand beside the body.

const bar = document.createElement('div')
bar.id = 'memformers'
bar.style = 'position: fixed; right: 12px; bottom: 12px; z-index: 10; padding: 8px 16px; border-radius: 12px; '
    + 'background: #34495e; color: #fff; font: 15px/1.4 system-ui, sans-serif; max-width: 80vw'
const link = document.createElement('a')
link.textContent = 'All runs in one chart'
link.style.color = '#fff'
bar.append(link)
const style = document.createElement('style')
style.textContent = '.process-row { display: none; }'  // buttons to pages that never have anything
bar.append(style)
document.documentElement.append(bar)

function lead() {
    const run = /^\/run\/(\w+)/.exec(location.pathname)
    link.href = '/comparisons' + (run ? `?run=${run[1]}` : '')
}

for (const event of ['pointerenter', 'focus', 'pointerdown', 'click']) {
    link.addEventListener(event, lead)
}
lead()

function check() {
    if (!window.d3 && bar.childNodes.length === 2) {
        bar.prepend("labml's page needs d3, Bootstrap and Font Awesome from public servers, which this browser "
            + 'does not reach. Our page needs no network: ')
    }
}

addEventListener('load', check)
setTimeout(check, 5000)
