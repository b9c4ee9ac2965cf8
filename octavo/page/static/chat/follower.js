// Keeps the end of what grows in view, unless the reader has scrolled away from it.

const NEAR = 48; // pixels from the end that still count as being there

export class Follower {
  #scroller;
  #button; // shown while the end is out of view; leads back to it
  #isFollowing = true;
  #lastTop = 0;

  constructor(scroller, button) {
    this.#scroller = scroller;
    this.#button = button;
    scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    button.addEventListener("click", () => this.follow(true));
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  /** To be called whenever the content has changed; `isForced` if the end is wanted anyway. */
  follow(isForced = false) {
    this.#isFollowing ||= isForced;
    if (this.#isFollowing) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#showButton();
  }

  #onScroll() {
    // Only a way up is the reader's wish: growing content moves the end, too.
    if (this.#isAtEnd()) this.#isFollowing = true;
    else if (this.#scroller.scrollTop < this.#lastTop) this.#isFollowing = false;
    this.#lastTop = this.#scroller.scrollTop;
    this.#showButton();
  }

  #isAtEnd() {
    const { scrollHeight, clientHeight, scrollTop } = this.#scroller;
    return scrollHeight - clientHeight - scrollTop < NEAR;
  }

  #showButton() {
    this.#button.hidden = this.#isFollowing || this.#isAtEnd();
  }
}
