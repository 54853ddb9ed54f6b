// Search runs in a worker, which browsers refuse to pages that were opened from a folder (file:). There a hidden frame
// takes its place: it runs the same script, and passes messages on. What Zensical would load from elsewhere does the same.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inner = this.frame.contentWindow;
    const script = (address) =>
      `<script src="${new URL(address, document.baseURI).href.replaceAll('"', "%22")}"><\/script>`;
    inner.postMessage = window.postMessage.bind(window);
    const scripts = "importScripts=(...all)=>all.reduce((done,one)=>done.then(()=>new Promise((loaded)=>{" +
      'const s=document.createElement("script");s.src=one;s.onload=loaded;document.body.append(s)})),Promise.resolve())';
    inner.document.open();
    inner.document.write(`<html><body><script>postMessage=parent.postMessage.bind(parent);${scripts}<\/script>${script(url)}</body></html>`);
    inner.document.close();
    this.ready = new Promise((loaded) => { inner.addEventListener("load", loaded); inner.onload = loaded; });
    window.addEventListener("message", (event) => {
      if (event.source !== this.frame.contentWindow) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    });
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() { this.frame.remove(); }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
