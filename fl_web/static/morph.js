// Changes an element's content into new HTML and keeps what has not changed: focus, open details and scroll positions.
// Children with data-key are matched by it, others by their order. Content below data-keep is never touched.

export function morph(target, html) {
  const source = document.createElement("template");
  source.innerHTML = html;
  children(target, source.content);
}

function children(target, source) {
  const keyed = new Map();
  for (const child of target.children) if (child.dataset && child.dataset.key) keyed.set(child.dataset.key, child);
  let at = target.firstChild;
  for (const wanted of [...source.childNodes]) {
    const key = wanted.nodeType === Node.ELEMENT_NODE ? wanted.dataset.key : undefined;
    const known = key === undefined ? at : keyed.get(key);
    if (known && same(known, wanted) && !(key === undefined && known.dataset && known.dataset.key)) {
      if (known !== at) target.insertBefore(known, at); else at = at.nextSibling;
      update(known, wanted);
    } else {
      target.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function same(left, right) {
  return left.nodeType === right.nodeType && left.nodeName === right.nodeName;
}

function update(target, source) {
  if (target.nodeType !== Node.ELEMENT_NODE) {
    if (target.nodeValue !== source.nodeValue) target.nodeValue = source.nodeValue;
    return;
  }
  const open = target.nodeName === "DETAILS" && target.open;
  const keep = target.hasAttribute("data-keep");
  for (const { name, value } of [...source.attributes]) {
    if (target.getAttribute(name) !== value && !(keep && name === "class")) target.setAttribute(name, value);
  }
  for (const { name } of [...target.attributes]) {
    if (!source.hasAttribute(name) && !(keep && name === "class") && !(open && name === "open")) target.removeAttribute(name);
  }
  if (!keep) children(target, source);
}
